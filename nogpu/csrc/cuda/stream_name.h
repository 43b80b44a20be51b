// The names of a stream of CUDA: for the runtime and for the clocks.
#pragma once

#include <c10/core/Stream.h>

#include "../runtime/runtime.h"

namespace simulated {

// Only the default stream of a device has no handle.
inline standin::StreamName name_of(void* handle, c10::DeviceIndex device) {
  return handle ? standin::name_of(handle) : standin::StreamName{device, 0};
}

inline c10::Stream stream_of(standin::StreamName name) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(name.device)),
                     static_cast<c10::StreamId>(name.number));
}

} // namespace simulated
