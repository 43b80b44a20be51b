// The watcher of the stand-in for CUDA's runtime: it tells the clocks and the counts what the runtime does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../runtime/runtime.h"
#include "clocks.h"

namespace simulated {

// Makes the runtime tell the clocks. Called once.
void watch_runtime();

// A launch on a stream, by way of the runtime, which knows what else the stream waits for. Throws c10::Error for an
// access that is not ordered.
clocks::Ticket launch_on(standin::StreamName stream, const std::string& op, c10::ArrayRef<Touch> touches,
                         standin::Turn turn);

// For each device, how many of the launches that were counted were captured ones.
std::vector<uint64_t> launches_in_graphs();

// True if queries of events and streams answer "not yet" until the host knows better.
void answer_queries_late(bool late);

} // namespace simulated
