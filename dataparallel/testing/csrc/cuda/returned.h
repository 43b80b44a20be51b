// Tells the clocks of memory that goes back to torch's caching allocator.
#pragma once

namespace simulated {

// Called once CUDA is initialised: the allocator has a part for each device from then on.
void watch_allocator();

} // namespace simulated
