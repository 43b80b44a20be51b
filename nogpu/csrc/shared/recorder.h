// Records launches for a timeline, and what each of them waits for. clocks.cpp calls it with its mutex held.
//
// A launch is recorded when it is issued, so the order of the entries is that of the launches on each stream and of each
// thread. It is done when its operator is. An entry that is never done does not count as a launch: its operator failed,
// or it began before the recording or ended after it. Python leaves it out and passes what it waited for to the next
// launch of its stream and thread.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "history.h"
#include "work.h"

namespace simulated {

// For each thread, by its number in the recording, its last launch that is known to have been issued.
struct Issued {
  Clock by_python; // by threads that run Python
  // By threads of a backward. They share this object with each other and with the thread that called backward, but only
  // that one reads this clock, after the end of the backward: nothing orders the threads of one backward.
  Clock by_backward;
};

struct Entry {
  using Marks = c10::SmallVector<std::pair<uint32_t, uint64_t>, 1>;

  StreamNumber stream = 0;
  uint64_t tick = 0;
  uint32_t thread = 0;
  bool in_backward = false;
  bool is_done = false;
  std::optional<StreamNumber> joins;
  Marks waits; // streams, and the ticks that they must have reached
  Marks host_waits; // the same
  Marks issued_after; // threads, and the positions of their entries; some are from before the recording
  double host_seconds = 0;
  uint64_t graph = 0; // the launch of a graph that it is a part of, numbered from 1; 0 if it was launched by itself
  std::string stack;
  Work work;
};

struct Recorded {
  std::deque<Entry> entries;
  std::vector<c10::Stream> streams; // by their numbers
  bool is_full = false; // there were more launches than the limit
};

// Can be asked without the mutex.
bool recorder_keeps_stacks();

class Recorder {
 public:
  void start(size_t limit, bool stacks);
  Recorded stop();

  void stream_waits(StreamNumber stream, const Clock& clock);
  // The calling thread, which knew `known`, has asked if `answer` has been reached, and has heard that it has.
  void host_asks(const Clock& known, const Clock& answer);
  // Returns the number of the entry, or 0 if nothing is being recorded. `clock` is that of the stream with this launch;
  // `known` and `issued` are what the calling thread knows.
  uint64_t issue(StreamNumber stream, std::optional<StreamNumber> joins, const Clock& clock, const Clock& known,
                 Issued& issued, bool in_backward, std::string stack);
  void done(uint64_t number, Work&& work);

  // What the calling thread issues in between is launched by one call of the host.
  void graph_begins();
  void graph_ends();

  void thread_begins();
  void learn(Issued& issued, const Issued& from, bool in_backward);
  void tell(Issued& to, const Issued& issued, bool in_backward);

 private:
  struct Thread;
  Thread& this_thread();
  Clock& at(std::vector<Clock>& clocks, StreamNumber stream);

  std::deque<Entry> entries_;
  size_t limit_ = 0;
  bool is_on_ = false;
  bool is_full_ = false;
  uint32_t threads_ = 0;
  uint64_t graphs_ = 0;
  // The number of the first entry. Numbers are never used again, so that what is left of an earlier recording is known.
  uint64_t first_ = 1;
  std::vector<Clock> waited_; // by stream: what it has waited for since the recording began
  std::vector<Clock> seen_; // by stream: its clock at its last entry
};

} // namespace simulated
