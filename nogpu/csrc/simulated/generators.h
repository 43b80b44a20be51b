// Random generators of the simulated devices.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace simulated {

at::Generator new_generator(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);
// The CPU generator that a simulated device's generator draws from.
at::Generator drawn_from(const at::Generator& generator);

} // namespace simulated
