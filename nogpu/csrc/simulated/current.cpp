#include "current.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>

#include "ceilings.h"

namespace simulated {
namespace {

std::atomic<c10::DeviceIndex> count{0};

thread_local c10::DeviceIndex current = 0;
// The driver's current device. After the thread has gone back to a device without a context it differs from `current`,
// until that device is used.
thread_local c10::DeviceIndex drivers = 0;
std::array<std::atomic<bool>, kCeiling> contexts{};

// Every thread starts on the default streams.
thread_local std::array<c10::StreamId, kCeiling> current_streams{};

void set(c10::DeviceIndex device) noexcept {
  current = device;
  if (drivers != device) {
    drivers = device;
    make_context(device);
  }
}

} // namespace

c10::DeviceIndex device_count() {
  return count;
}

void set_device_count(c10::DeviceIndex new_count) {
  count = new_count;
}

c10::DeviceIndex checked(c10::DeviceIndex device) {
  if (device == -1) {
    return current;
  }
  const c10::DeviceIndex there = count;
  TORCH_CHECK(device >= 0 && device < there, "sim:", static_cast<int>(device), ": this process simulates ",
              static_cast<int>(there), " devices, sim:0 to sim:", there - 1);
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

c10::Stream current_stream(c10::Device device) {
  const auto index = checked(device.index());
  const auto id = current_streams.at(static_cast<size_t>(index));
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, index), id);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device());
  current_streams.at(static_cast<size_t>(stream.device_index())) = stream.id();
  return before;
}

c10::Stream stream_here() noexcept {
  const auto device = current_device();
  return c10::Stream(c10::Stream::UNSAFE, device, current_streams[static_cast<size_t>(device.index())]);
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
