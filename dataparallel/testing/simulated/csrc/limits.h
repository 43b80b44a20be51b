// How many devices and streams there can be.
#pragma once

#include <cstddef>

namespace simulated {

// The autograd engine makes its threads, one per device, at the first backward and never again: so many are registered.
constexpr size_t kCeiling = 64;
// Stream 0 is the default one; new ones come from a pool of 32 in turn, as on CUDA.
constexpr size_t kStreams = 33;

} // namespace simulated
