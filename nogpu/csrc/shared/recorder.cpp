#include "recorder.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>

namespace simulated {
namespace {

std::atomic<bool> keeps_stacks{false};

// Raises `seen` to `now`, and adds what has risen.
void raise(Clock& seen, const Clock& now, Entry::Marks& risen) {
  for (uint32_t i = 0; i < now.size(); ++i) {
    if (now[i] > seen[i]) {
      seen.raise(i, now[i]);
      risen.emplace_back(i, now[i]);
    }
  }
}

void leave_out(Entry::Marks& marks, uint32_t number) {
  marks.erase(std::remove_if(marks.begin(), marks.end(), [&](const auto& mark) { return mark.first == number; }),
              marks.end());
}

} // namespace

// What a thread knew at its last launch.
struct Recorder::Thread {
  uint64_t recording = 0; // the number of its first entry
  std::optional<uint32_t> number;
  uint64_t last = 0;
  Clock known;
  Entry::Marks waits; // those since its last launch that came before a question
  Clock issued;
  Clock learned; // launches that others have issued, which this thread has learned of within a backward
  std::optional<double> ended; // its CPU time at the end of its last launch
  uint64_t graph = 0; // that it launches now
  uint64_t graph_of_last = 0; // that its last launch was a part of
};

bool recorder_keeps_stacks() {
  return keeps_stacks.load(std::memory_order_relaxed);
}

void Recorder::start(size_t limit, bool stacks) {
  TORCH_CHECK(!is_on_ && !is_full_, "launches are being recorded already");
  limit_ = limit;
  threads_ = 0;
  graphs_ = 0;
  waited_.clear();
  seen_.clear();
  is_on_ = true;
  keeps_stacks = stacks;
  set_recording(true);
  thread_begins();
}

Recorded Recorder::stop() {
  Recorded result;
  const auto begin = std::exchange(first_, first_ + entries_.size() + 1);
  result.entries = std::exchange(entries_, {});
  result.is_full = std::exchange(is_full_, false);
  is_on_ = false;
  set_recording(false);
  keeps_stacks = false;
  for (auto& entry : result.entries) {
    auto& marks = entry.issued_after;
    for (auto& mark : marks) {
      mark.second = mark.second < begin ? UINT64_MAX : mark.second - begin;
    }
    marks.erase(std::remove_if(marks.begin(), marks.end(), [](const auto& mark) { return mark.second == UINT64_MAX; }),
                marks.end());
  }
  return result;
}

Clock& Recorder::at(std::vector<Clock>& clocks, StreamNumber stream) {
  if (stream >= clocks.size()) {
    clocks.resize(stream + 1);
  }
  return clocks[stream];
}

Recorder::Thread& Recorder::this_thread() {
  static thread_local Thread thread;
  if (thread.recording != first_) {
    thread = Thread();
    thread.recording = first_;
  }
  return thread;
}

void Recorder::stream_waits(StreamNumber stream, const Clock& clock) {
  if (is_on_) {
    at(waited_, stream).join(clock);
  }
}

void Recorder::host_asks(const Clock& known, const Clock& answer) {
  if (is_on_) {
    auto& thread = this_thread();
    raise(thread.known, known, thread.waits);
    thread.known.join(answer);
  }
}

uint64_t Recorder::issue(StreamNumber stream, std::optional<StreamNumber> joins, const Clock& clock, const Clock& known,
                         Issued& issued, bool in_backward, std::string stack) {
  if (!is_on_) {
    return 0;
  }
  if (entries_.size() == limit_) {
    is_full_ = true;
    is_on_ = false;
    set_recording(false);
    return 0;
  }
  auto& thread = this_thread();
  if (!thread.number) {
    thread.number = threads_++;
  }
  thread.last = first_ + entries_.size();
  auto& entry = entries_.emplace_back();
  entry.stream = stream;
  entry.tick = clock[stream];
  entry.thread = *thread.number;
  entry.in_backward = in_backward;
  entry.joins = joins;
  entry.graph = thread.graph;
  entry.stack = std::move(stack);

  auto& seen = at(seen_, stream);
  raise(seen, at(waited_, stream), entry.waits);
  leave_out(entry.waits, stream);
  seen = clock;
  entry.host_waits = std::exchange(thread.waits, {});
  raise(thread.known, known, entry.host_waits);

  raise(thread.issued, thread.learned, entry.issued_after);
  raise(thread.issued, issued.by_python, entry.issued_after);
  if (!in_backward) {
    raise(thread.issued, issued.by_backward, entry.issued_after);
  }
  leave_out(entry.issued_after, *thread.number);
  (in_backward ? issued.by_backward : issued.by_python).raise(*thread.number, thread.last);
  return thread.last;
}

void Recorder::done(uint64_t number, Work&& work) {
  auto& thread = this_thread();
  const auto begun = work.begun;
  if (number >= first_ && number - first_ < entries_.size()) {
    auto& entry = entries_[number - first_];
    entry.is_done = true;
    const bool is_rest_of_graph = entry.graph != 0 && entry.graph == thread.graph_of_last;
    entry.host_seconds = thread.ended && !is_rest_of_graph ? std::max(begun - *thread.ended, 0.0) : 0.0;
    thread.graph_of_last = entry.graph;
    entry.work = std::move(work);
  }
  thread.ended = thread_seconds();
}

void Recorder::graph_begins() {
  if (is_on_) {
    this_thread().graph = ++graphs_;
  }
}

void Recorder::graph_ends() {
  if (is_on_) {
    this_thread().graph = 0;
    this_thread().ended = thread_seconds();
  }
}

void Recorder::thread_begins() {
  if (is_on_) {
    this_thread().ended = thread_seconds();
  }
}

void Recorder::learn(Issued& issued, const Issued& from, bool in_backward) {
  if (is_on_) {
    (in_backward ? this_thread().learned : issued.by_python).join(from.by_python);
  }
}

void Recorder::tell(Issued& to, const Issued& issued, bool in_backward) {
  if (!is_on_) {
    return;
  }
  auto& thread = this_thread();
  to.by_python.join(issued.by_python);
  to.by_python.join(thread.learned);
  if (!in_backward) {
    to.by_python.join(issued.by_backward);
  } else if (thread.number) {
    to.by_python.raise(*thread.number, thread.last);
  }
}

} // namespace simulated
