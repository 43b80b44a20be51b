// The simulated devices as torch sees them: how many, streams, events, generators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "current_device.h"

namespace simulated {

// How many devices there are for users. The engine sees the ceiling, as long as it makes its threads.
c10::DeviceIndex device_count();
void set_device_count(c10::DeviceIndex count);

c10::Stream current_stream(c10::Device device);
// The current one of the current device; also while there are no devices for users.
c10::Stream stream_here() noexcept;

const at::Generator& default_generator(c10::DeviceIndex device);
// The generator of the CPU that a simulated device's generator draws from.
at::Generator drawn_from(const at::Generator& generator);

void register_hooks();

} // namespace simulated
