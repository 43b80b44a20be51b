// Implements the hooks that torch calls beside the device guards: availability, generators, pinned memory.
#pragma once

namespace simulated {

void register_hooks();

} // namespace simulated
