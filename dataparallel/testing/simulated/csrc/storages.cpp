#include "storages.h"

#include <c10/core/CPUAllocator.h>

#include "memory.h"

namespace simulated {

c10::Storage cpu_storage_over(const c10::Storage& device) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), device.nbytes(), memory::held_by(device), c10::GetCPUAllocator(),
      /*resizable=*/true);
}

c10::Storage Storages::on_cpu(const c10::Storage& device) {
  auto* storage = device.unsafeGetStorageImpl();
  for (const auto& pair : pairs_) {
    if (pair.device.unsafeGetStorageImpl() == storage) {
      return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(pair.cpu));
    }
  }
  auto cpu = cpu_storage_over(device);
  add(cpu, device);
  return cpu;
}

const c10::Storage* Storages::on_device(const c10::Storage& cpu) const {
  for (const auto& pair : pairs_) {
    if (pair.cpu == cpu.unsafeGetStorageImpl() && pair.data == cpu.data()) {
      return &pair.device;
    }
  }
  return nullptr;
}

void Storages::add(const c10::Storage& cpu, c10::Storage device) {
  pairs_.push_back({cpu.unsafeGetStorageImpl(), std::move(device), cpu.mutable_data()});
}

void Storages::have_moved(const c10::Storage& cpu) {
  for (auto& pair : pairs_) {
    if (pair.cpu == cpu.unsafeGetStorageImpl()) {
      pair.data = cpu.mutable_data();
    }
  }
}

} // namespace simulated
