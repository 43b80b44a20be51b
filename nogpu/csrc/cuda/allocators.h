// Tells the clocks of memory that torch's caching allocators take back and give out, of devices and of pinned memory.
#pragma once

#include "../runtime/watcher.h"
#include "history.h"

namespace simulated::allocators {

// Called once CUDA is initialised: the allocator has a part for each device from then on.
void watch();

// Before an allocator gives memory out again, it waits for events of its own that it has recorded when the memory was
// freed. It asks them from time to time, in whatever thread calls it, and the program learns nothing of the answers.

// The calling thread has recorded an event. Returns true if the allocator of a device has done so, for memory that is
// being freed.
bool has_recorded(const standin::EventState& event, const Clock& clock);
// The calling thread does something that no allocator does while it frees memory.
void does_something_else();
// True while the calling thread is in the allocator of pinned memory.
bool are_asking();

} // namespace simulated::allocators
