// A stream of CUDA's runtime, as the clocks name it.
#pragma once

#include <c10/core/Stream.h>

#include "../runtime/watcher.h"

namespace simulated {

inline c10::Stream stream_of(standin::StreamName name) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(name.device)),
                     static_cast<c10::StreamId>(name.number));
}

} // namespace simulated
