#include "current_device.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>

#include "devices.h"
#include "limits.h"

namespace simulated {
namespace {

thread_local c10::DeviceIndex current = 0;
// The device that the driver has: another one while it is to be told of the current one when that is used.
thread_local c10::DeviceIndex drivers = 0;
std::array<std::atomic<bool>, kCeiling> contexts{};

void set(c10::DeviceIndex device) noexcept {
  current = device;
  if (drivers != device) {
    drivers = device;
    make_context(device);
  }
}

} // namespace

c10::DeviceIndex checked(c10::DeviceIndex device) {
  if (device == -1) {
    return current;
  }
  const auto count = device_count();
  TORCH_CHECK(device >= 0 && device < count, "sim:", static_cast<int>(device), ": this process simulates ",
              static_cast<int>(count), " devices, sim:0 to sim:", count - 1);
  return device;
}

c10::Device current_device() {
  return {c10::kPrivateUse1, current};
}

void set_current_device(c10::DeviceIndex device) {
  set(checked(device));
}

void go_back_to(c10::DeviceIndex device) noexcept {
  if (device < 0) {
    return;
  }
  if (has_context(device)) {
    set(device);
  } else {
    current = device;
  }
}

bool has_context(c10::DeviceIndex device) noexcept {
  return contexts[static_cast<size_t>(device)];
}

void make_context(c10::DeviceIndex device) noexcept {
  contexts[static_cast<size_t>(device)] = true;
}

void forget_contexts() noexcept {
  for (auto& context : contexts) {
    context = false;
  }
}

OnDevice::OnDevice(c10::Device device) : before_(current) {
  set_current_device(device.index());
}

OnDevice::~OnDevice() {
  go_back_to(before_);
}

OnDeviceOfEvent::OnDeviceOfEvent(c10::DeviceIndex device) noexcept : before_(current) {
  set(device);
}

OnDeviceOfEvent::~OnDeviceOfEvent() {
  set(before_);
}

} // namespace simulated
