// Which accesses race, and what to say then. Called with the mutex of clocks.cpp held; knows no thread.
#pragma once

#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "clocks.h"

namespace simulated {

// A host thread, and the number of the backward that it works for, or -1.
struct Worker {
  std::thread::id thread;
  int backward = -1;
};

// When memory was last taken from a stream in one backward, by each thread: after which of the stream's launches.
struct Taken {
  int backward = -1;
  std::map<std::thread::id, uint64_t> ticks;
};

// What is known of all streams, by their numbers.
struct Streams {
  std::vector<Clock> clocks;
  std::vector<c10::Stream> names;
  std::vector<std::vector<Debt>> debts; // by the stream that the memory went back to; one per other stream: the last
  std::vector<Taken> taken;
  std::atomic<bool> has_debts{false};
};

namespace races {

bool ordered(const Clock& clock, const Access& earlier);

// The message for the first of the touches that is not ordered; notes the others.
std::string touch_all(Streams& s, const Clock& clock, const std::string& op, c10::ArrayRef<Touch> touches,
                      const Access& access);

// Memory of `home` is taken, after its launch number `tick`.
void took(Streams& s, StreamNumber home, uint64_t tick, const Worker& worker);
// Whether another thread of the same backward has taken memory from `home` after its launch number `known`.
bool is_contested(const Streams& s, StreamNumber home, uint64_t known, const Worker& worker);
// Memory that has gone back to `home` may still be in use.
void owe(Streams& s, StreamNumber home, Debt debt);
// Forgets what is over and nobody has contested, and returns the first debt that is not, if any.
const Debt* pending(Streams& s, StreamNumber home, const Clock& known);
std::string freed_too_early(const Streams& s, const Debt& debt, StreamNumber home);

} // namespace races
} // namespace simulated
