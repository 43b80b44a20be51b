#include "storages.h"

#include <c10/core/Allocator.h>

namespace simulated {
c10::DataPtr held_by(const c10::Storage& storage, c10::DeviceType type) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(impl);
  const auto release = [](void* held) { c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(held)); };
  return {impl->mutable_data(), impl, release, c10::Device(type)};
}

c10::Storage storage_over(const c10::Storage& device, c10::DeviceType type) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), device.nbytes(), held_by(device, type), c10::GetAllocator(type),
      /*resizable=*/true);
}

c10::Storage Storages::standing_for(const c10::Storage& device) {
  auto* storage = device.unsafeGetStorageImpl();
  for (const auto& pair : pairs_) {
    if (pair.device.unsafeGetStorageImpl() == storage) {
      return pair.standing;
    }
  }
  auto standing = storage_over(device, type_);
  add(standing, device);
  return standing;
}

const c10::Storage* Storages::on_device(const c10::Storage& standing) const {
  for (const auto& pair : pairs_) {
    if (pair.standing.unsafeGetStorageImpl() == standing.unsafeGetStorageImpl() && pair.data == standing.data()) {
      return &pair.device;
    }
  }
  return nullptr;
}

void Storages::add(const c10::Storage& standing, c10::Storage device) {
  pairs_.push_back({standing, std::move(device), standing.mutable_data()});
}

void Storages::have_moved(const c10::Storage& standing) {
  for (auto& pair : pairs_) {
    if (pair.standing.unsafeGetStorageImpl() == standing.unsafeGetStorageImpl()) {
      pair.data = standing.mutable_data();
    }
  }
}

} // namespace simulated
