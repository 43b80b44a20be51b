// The number of devices, each thread's current device and streams, and the devices that have a context.
//
// As with torch on CUDA, a device gets a context when it becomes current in place of another one, and when memory is
// allocated on it. Going back to a device without a context makes none: the device becomes current for torch, and the
// driver is told when the device is used.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "front.h"

namespace simulated {

// The number of devices that users have. It is kCeiling while the autograd engine makes its threads.
c10::DeviceIndex device_count();
void set_device_count(c10::DeviceIndex count);

void set_current_device(c10::DeviceIndex device);
void go_back_to(c10::DeviceIndex device) noexcept;

bool has_context(c10::DeviceIndex device) noexcept;
void make_context(c10::DeviceIndex device) noexcept;
void forget_contexts() noexcept;

// Returns the index, or the current device for -1. Throws c10::Error if the process does not simulate the device.
c10::DeviceIndex checked(c10::DeviceIndex device);

// Makes the stream current on its device, and returns the former one.
c10::Stream exchange_stream(c10::Stream stream);
// The current stream of the current device, even while users have no devices.
c10::Stream stream_here() noexcept;

// As `OnDevice`, but as torch's CUDA guard does it around events: at the end it sets the former device even if that one has no
// context. (From torch 2.15 on, CUDA's guard does so only where it destroys an event.)
class OnDeviceOfEvent {
 public:
  explicit OnDeviceOfEvent(c10::DeviceIndex device) noexcept;
  ~OnDeviceOfEvent();
  OnDeviceOfEvent(const OnDeviceOfEvent&) = delete;
  OnDeviceOfEvent& operator=(const OnDeviceOfEvent&) = delete;

 private:
  c10::DeviceIndex before_;
};

} // namespace simulated
