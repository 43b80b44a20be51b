// Finds accesses that race, and writes the error messages. clocks.cpp calls it with its mutex held.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "history.h"

namespace simulated {

// A host thread, and the number of the backward that it works for, or -1.
struct Worker {
  std::thread::id thread;
  int backward = -1;
};

// For a stream and a backward, the number of the stream's launch after which each thread last took memory from it.
struct Taken {
  int backward = -1;
  std::map<std::thread::id, uint64_t> ticks;
};

// What is known about all streams, by their numbers.
struct Streams {
  std::vector<Clock> clocks;
  std::vector<c10::Stream> names;
  // By the stream that the memory returned to: the last access of each other stream.
  std::vector<std::vector<Debt>> debts;
  std::vector<Taken> taken;
  PeerAccesses kept; // to memory that an allocator has got back since, and keeps until it is told to let go
  Clock anybody; // what any host thread, or an allocator of the host, has waited for
  std::atomic<bool> has_debts{false};
  std::atomic<bool> keeps_stacks{false};
};

namespace races {

bool ordered(const Clock& clock, const Access& earlier);

// Records the touches up to the first one that is not ordered. Returns the message for that one, or nothing.
std::string touch_all(Streams& s, const Clock& clock, const std::string& op, c10::ArrayRef<Touch> touches,
                      const Access& access);

// The message if the host, which knows `clock`, touches memory that a stream may still use. Records nothing: launches
// after the host's access come after it anyway.
std::string host_touches(Streams& s, const Clock& clock, const std::string& op, c10::ArrayRef<Touch> touches);

// One access for each stream and device.
void keep_latest(PeerAccesses& accesses, const PeerAccess& latest);
void note_read(History::Segment& segment, const Access& access);
// Removes the accesses that are known to be complete.
template <class IsComplete>
void forget(History::Segment& segment, const IsComplete& is_complete) {
  if (is_complete(segment.write)) {
    segment.write = {};
  }
  segment.reads.erase(std::remove_if(segment.reads.begin(), segment.reads.end(), is_complete), segment.reads.end());
}

// The message if memory ceases to exist that a stream may still use, for a host that knows `clock`.
std::string gone(const Streams& s, const Clock& clock, const Tracked& block);
// The same for streams of other devices only, whose accesses these are.
std::string gone_for_peers(const Streams& s, const Clock& clock, const PeerAccesses& accesses);

// Records that memory of `home` has been taken after its launch number `tick`.
void took(Streams& s, StreamNumber home, uint64_t tick, const Worker& worker);
// True if another thread of the same backward has taken memory from `home` after its launch number `known`.
bool is_contested(const Streams& s, StreamNumber home, uint64_t known, const Worker& worker);
// Records an access that may still use memory which has returned to `home`.
void owe(Streams& s, StreamNumber home, Debt debt);
// Removes the debts that are complete and not contested. Returns the first of the others, or null.
const Debt* pending(Streams& s, StreamNumber home, const Clock& known);
std::string freed_too_early(const Streams& s, const Debt& debt, StreamNumber home);

} // namespace races
} // namespace simulated
