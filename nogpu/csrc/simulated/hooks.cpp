#include "hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "current.h"
#include "generators.h"
#include "memory.h"

namespace simulated {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device >= 0 && device < device_count();
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device().index();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    go_back_to(device);
    return before;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(checked(device));
  }
  at::Device getDeviceFromPtr(void*) const override {
    TORCH_CHECK(false, "memory of simulated devices is host memory: a pointer does not tell its device");
  }
  bool isPinnedPtr(const void* data) const override {
    return memory::pinned_block_of(data) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return memory::pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    if (bytes > impl->nbytes()) {
      memory::grow(*impl, bytes);
    } else if (bytes < impl->nbytes()) {
      memory::move(*impl, bytes);
    }
  }
};

} // namespace

void register_hooks() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(c10::kPrivateUse1, memory::device_allocator());
}

} // namespace simulated
