// The frame around CUDA's functions: the state of a thread, counts of calls and host waits, and what a forked child
// may do (nothing, if its parent has used CUDA).
#include <pthread.h>

#include <map>

#include "state.h"

namespace standin {

namespace {

std::atomic<CallCount*> functions{nullptr};
std::atomic<uint64_t> waits{0};
std::atomic<bool> used{false};
std::atomic<bool> child{false};

} // namespace

CallCount::CallCount(const char* function) : name(function), next(functions.load()) {
  while (!functions.compare_exchange_weak(next, this)) {
  }
}

namespace {

thread_local Thread* own = nullptr;

// The state goes with its thread. Destructors that run later, as those of libraries at the end of the process, may call
// CUDA again: then there is a new one, which stays.
struct Owner {
  ~Owner() {
    for (auto* stream : own->streams) {
      if (stream != nullptr) {
        stream->alive = false;
      }
    }
    delete std::exchange(own, nullptr);
  }
};

Thread& new_thread() {
  own = new Thread;
  static thread_local Owner owner;
  (void)owner;
  return *own;
}

} // namespace

Thread& this_thread() {
  return own != nullptr ? *own : new_thread();
}

bool in_child() {
  return child.load(std::memory_order_relaxed);
}

void use_driver() {
  if (used.load(std::memory_order_relaxed) || used.exchange(true)) {
    return;
  }
  pthread_atfork(nullptr, nullptr, [] { child.store(true); });
}

void count_host_wait() {
  waits.fetch_add(1, std::memory_order_relaxed);
}

void count_call(const char* function) {
  static std::mutex lock;
  static auto& known = *new std::map<std::string, CallCount>;
  const std::lock_guard<std::mutex> guard(lock);
  known.try_emplace(function, function).first->second.calls.fetch_add(1, std::memory_order_relaxed);
}

int refuse_stub(const char* function) {
  count_call(function);
  return this_thread().last = failed(std::string("the stand-in for CUDA does not have ") + function);
}

Counts counts() {
  Counts result;
  for (auto* function = functions.load(); function != nullptr; function = function->next) {
    if (const auto calls = function->calls.load()) {
      result.calls.emplace_back(function->name, calls);
    }
  }
  result.kernels = launched_kernels(false);
  for (int i = 0; is_used() && i < device_count(); ++i) {
    result.contexts.push_back(device_at(i).context);
  }
  result.host_waits = waits.load();
  return result;
}

// Contexts stay: they are there.
void forget_counts() {
  for (auto* function = functions.load(); function != nullptr; function = function->next) {
    function->calls = 0;
  }
  launched_kernels(true);
  waits = 0;
}

} // namespace standin
