// How many devices there are, the current device and streams of a thread, and which devices have a context.
//
// As with CUDA and torch on top of it, a device gets a context when it is made current in place of another one, and when
// memory is taken on it. To go back to a device without a context makes none: it is the current device from then on, and
// the driver is told when it is used.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace simulated {

// How many devices there are for users. The engine sees the ceiling while it makes its threads.
c10::DeviceIndex device_count();
void set_device_count(c10::DeviceIndex count);

c10::Device current_device();
void set_current_device(c10::DeviceIndex device);
void go_back_to(c10::DeviceIndex device) noexcept;

bool has_context(c10::DeviceIndex device) noexcept;
void make_context(c10::DeviceIndex device) noexcept;
void forget_contexts() noexcept;

// The index, where the process simulates that device; the current one for -1.
c10::DeviceIndex checked(c10::DeviceIndex device);

c10::Stream current_stream(c10::Device device);
// Makes the stream current on its device, and returns the one that was.
c10::Stream exchange_stream(c10::Stream stream);
// The current stream of the current device; also while there are no devices for users.
c10::Stream stream_here() noexcept;

// Makes a device current while it exists.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex before_;
};

// The same as torch's guard for CUDA does it around events: at the end it sets the former device, used or not. (From
// torch 2.15 on only where an event is destroyed.)
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
