#include "returned.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include "front.h"
#include "watch.h"

namespace simulated {

// The allocator calls this under its own lock, so nothing here may call it or Python.
void watch_allocator() {
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
      [](const c10::CachingDeviceAllocator::TraceEntry& entry) {
        if (entry.action_ != c10::CachingDeviceAllocator::TraceEntry::FREE_COMPLETED) {
          return;
        }
        const auto part = standin::part_of(reinterpret_cast<void*>(entry.addr_), entry.size_, false, "");
        if (part.memory && part.memory->watched) {
          clocks::returned(*static_cast<Tracked*>(part.memory->watched), {part.begin, part.begin + entry.size_},
                           asked_here());
        }
      });
}

} // namespace simulated
