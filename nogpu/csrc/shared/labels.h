// Names of devices for messages.
#pragma once

#include <c10/core/Device.h>

namespace simulated {

// For example "sim:1". The text is there until the process ends.
const char* label_of(c10::DeviceIndex device);

} // namespace simulated
