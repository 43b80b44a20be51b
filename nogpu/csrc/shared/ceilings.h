// The largest numbers of devices and of streams.
#pragma once

#include <cstddef>

namespace simulated {

// The autograd engine makes its threads, one per device, at the first backward and never again. So the process has this
// many devices then.
constexpr size_t kCeiling = 64;
// Stream 0 is the default stream. New streams come from a pool of 32 in turn, as on CUDA.
constexpr size_t kStreams = 33;

} // namespace simulated
