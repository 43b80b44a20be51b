// A schedule as late as possible. Work is queued in its stream, with the places in other streams that it comes after,
// and is done when somebody has to know that it is. Only what a wait depends on is done, so that a wait that is missing
// lets the program read memory too early, in every run.
//
// Places name work that was queued before, so no two wait for each other. `lock` guards the queues and is held for
// moments. `running` is held by the thread that does work, which calls neither CUDA nor Python.
#include "late.h"

#include "capturing.h"

#include <set>

namespace standin {

namespace {

std::mutex lock, running;
std::atomic<size_t> waiting{0}; // in all queues, and what is being done
std::atomic<bool> wanted{false};
std::atomic<bool> skipping{false};
std::set<Stream*>& queued = *new std::set<Stream*>; // whose queues are not empty
LateCounts& counted = *new LateCounts;
uint64_t pieces = 0; // ever queued

// With `lock` held.
void add(Stream& stream, Postponed&& work) {
  stream.queue.push_back(std::move(work));
  ++stream.given;
  stream.latest = ++pieces;
  ++waiting;
  queued.insert(&stream);
}

bool is_over(const Place& place) {
  return stream_named(place.stream).done >= place.count;
}

// What comes next before the place, in the order that the streams demand. Null if there is nothing left.
Stream* next_before(std::vector<Place>& goals) {
  while (!goals.empty()) {
    if (is_over(goals.back())) {
      goals.pop_back();
      continue;
    }
    auto& stream = stream_named(goals.back().stream);
    const auto& before = stream.queue.front().before;
    if (is_over(before)) {
      return &stream;
    }
    goals.push_back(before);
  }
  return nullptr;
}

// All is done, also after work that has failed: its error is thrown at the end.
void finish(std::vector<Place> goals) {
  const std::lock_guard<std::mutex> alone(running);
  std::unique_lock<std::mutex> guard(lock);
  std::string failure;
  while (auto* stream = next_before(goals)) {
    auto work = std::move(stream->queue.front().work);
    guard.unlock();
    try {
      if (work) {
        work();
      }
    } catch (const std::exception& error) {
      failure = failure.empty() ? error.what() : failure;
    }
    work = nullptr;
    guard.lock();
    stream->queue.pop_front();
    ++stream->done;
    --waiting;
    if (stream->queue.empty()) {
      queued.erase(stream);
    }
  }
  if (!failure.empty()) {
    throw std::runtime_error(failure);
  }
}

// The last of them is done first. It is the end of the stream that was given work last, so what nothing orders is done
// in the opposite order.
std::vector<Place> ends_of_queues(int device) { // of all devices for -1
  const std::lock_guard<std::mutex> guard(lock);
  std::vector<const Stream*> streams;
  for (const auto* stream : queued) {
    if (device < 0 || stream->name.device == device) {
      streams.push_back(stream);
    }
  }
  std::sort(streams.begin(), streams.end(), [](const auto* a, const auto* b) { return a->latest < b->latest; });
  std::vector<Place> result;
  for (const auto* stream : streams) {
    result.push_back({stream->name, stream->given});
  }
  return result;
}

} // namespace

bool is_late() {
  return wanted || skipping;
}

void set_skipping(bool skips) {
  finish_all();
  skipping = skips;
}

void set_late(bool late) {
  {
    const std::lock_guard<std::mutex> guard(lock);
    wanted = late;
  }
  if (!late) {
    finish_all();
  }
}

LateCounts late_counts() {
  const std::lock_guard<std::mutex> guard(lock);
  auto result = counted;
  result.waiting = waiting;
  return result;
}

Place place_of(StreamName name) {
  const auto& stream = stream_named(name);
  const std::lock_guard<std::mutex> guard(lock);
  return {name, stream.given};
}

void come_after(Stream& stream, const Place& before) {
  if (waiting == 0) {
    return;
  }
  const std::lock_guard<std::mutex> guard(lock);
  if (!is_over(before)) {
    add(stream, {nullptr, before});
  }
}

void in_turn(StreamName name, std::function<void()> work) {
  auto& stream = stream_named(name);
  if (is_capturing(stream)) {
    keep_work(stream, std::move(work));
    return;
  }
  if (skipping) {
    return;
  }
  {
    const std::lock_guard<std::mutex> guard(lock);
    if (wanted) {
      add(stream, {std::move(work), {name, 0}});
      ++counted.postponed;
      return;
    }
  }
  finish(place_of(name));
  work();
}

void catch_up(StreamName stream, const char* name) {
  if (wanted) {
    const std::lock_guard<std::mutex> guard(lock);
    ++counted.at_once[name];
  }
  finish(place_of(stream));
}

void finish(const Place& before) {
  if (waiting > 0) {
    finish(std::vector<Place>{before});
  }
}

void finish_device(int device) {
  if (waiting > 0) {
    finish(ends_of_queues(device));
  }
}

void finish_all() {
  finish_device(-1);
}

bool is_done(const EventState& event) {
  const std::lock_guard<std::mutex> guard(lock);
  return is_over(event.place);
}

} // namespace standin
