// Events. A slot is used again after cudaEventDestroy, but its handle has the count of its uses, so an old one is
// recognised.
#include "capturing.h"

namespace standin {

namespace {

constexpr uintptr_t kTag = uintptr_t{0x5b} << 56;
constexpr unsigned kIndexBits = 22;
constexpr size_t kChunk = 1024;
constexpr size_t kChunks = (size_t{1} << kIndexBits) / kChunk;

struct Slot {
  std::atomic<uint32_t> use{0}; // odd while there is an event in it
  Event event;
};

std::atomic<Slot*> chunks[kChunks];
std::mutex changing;
size_t slots = 0;
std::vector<size_t>& unused = *new std::vector<size_t>;

Slot& slot_at(size_t index) {
  return chunks[index / kChunk].load(std::memory_order_acquire)[index % kChunk];
}

Slot* find(void* handle) {
  const auto value = reinterpret_cast<uintptr_t>(handle);
  const auto index = (value >> 4) & ((size_t{1} << kIndexBits) - 1);
  const auto use = static_cast<uint32_t>((value >> (kIndexBits + 4)) & 0x3fffffff);
  if (value >> 56 != kTag >> 56 || value % 16 != 0 || chunks[index / kChunk].load() == nullptr) {
    return nullptr;
  }
  auto& slot = slot_at(index);
  return use % 2 == 1 && slot.use.load(std::memory_order_acquire) == use ? &slot : nullptr;
}

size_t take_slot() {
  const std::lock_guard<std::mutex> guard(changing);
  if (!unused.empty()) {
    const auto index = unused.back();
    unused.pop_back();
    return index;
  }
  if (slots == kChunk * kChunks) {
    throw Refused{cudaErrorMemoryAllocation};
  }
  if (slots % kChunk == 0) {
    chunks[slots / kChunk] = new Slot[kChunk];
  }
  return slots++;
}

// Only events that measure time have one, and only once they are done.
cudaError_t check_timed(const Event& event) {
  if (!event.recorded || (event.flags & cudaEventDisableTiming) != 0) {
    return cudaErrorInvalidResourceHandle;
  }
  return event_is_done(event) ? cudaSuccess : cudaErrorNotReady;
}

} // namespace

bool event_is_done(const Event& event) {
  refuse_if_captured(event);
  auto* told = event.recorded ? watcher() : nullptr;
  return told == nullptr || told->host_asks(event.state);
}

void* create_event(unsigned flags) {
  constexpr unsigned known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
  if ((flags & ~known) != 0 || (flags & (cudaEventInterprocess | cudaEventDisableTiming)) == cudaEventInterprocess) {
    throw Refused{cudaErrorInvalidValue};
  }
  const auto device = context_here().index;
  const auto index = take_slot();
  auto& slot = slot_at(index);
  slot.event = Event();
  slot.event.device = device;
  slot.event.flags = flags;
  const auto use = (slot.use.load() + 1) & 0x3fffffff;
  slot.use.store(use, std::memory_order_release);
  return reinterpret_cast<void*>(kTag | uintptr_t{use} << (kIndexBits + 4) | index << 4);
}

void destroy_event(void* handle) {
  auto* slot = find(handle);
  uint32_t use = slot ? slot->use.load() : 0;
  if (slot == nullptr || !slot->use.compare_exchange_strong(use, (use + 1) & 0x3fffffff)) {
    throw Refused{cudaErrorInvalidResourceHandle};
  }
  if (auto* told = slot->event.recorded ? watcher() : nullptr) {
    told->forget(slot->event.state);
  }
  const std::lock_guard<std::mutex> guard(changing);
  unused.push_back((reinterpret_cast<uintptr_t>(handle) >> 4) & ((size_t{1} << kIndexBits) - 1));
}

Event& event_of(void* handle) {
  auto* slot = find(handle);
  if (slot == nullptr) {
    throw Refused{cudaErrorInvalidResourceHandle};
  }
  return slot->event;
}

void record_event(Event& event, Stream& stream, const void* caller) {
  if (event.device != stream.name.device) {
    throw Refused{cudaErrorInvalidResourceHandle};
  }
  order(stream);
  auto* told = watcher();
  if (told != nullptr && event.recorded) {
    told->forget(event.state);
  }
  event.captured = nullptr;
  if (is_capturing(stream)) {
    event.recorded = false;
    record_in_capture(event, stream);
    return;
  }
  event.state.stream = stream.name;
  event.state.caller = caller;
  event.recorded = true;
  event.time = std::chrono::steady_clock::now();
  if (told != nullptr) {
    told->recorded(event.state, stream.name);
  }
}

void synchronize(Event& event, const char* call) {
  refuse_if_captured(event);
  if (!event.recorded) {
    return;
  }
  count_host_wait();
  if (auto* told = watcher()) {
    told->host_waited(event.state, call);
  }
}

cudaError_t elapsed(float* milliseconds, Event& from, Event& to) {
  if (from.device != to.device) {
    return cudaErrorInvalidResourceHandle;
  }
  const auto first = check_timed(from), second = check_timed(to);
  if (first != cudaSuccess || second != cudaSuccess) {
    const auto unusable = first == cudaErrorInvalidResourceHandle || second == cudaErrorInvalidResourceHandle;
    return unusable ? cudaErrorInvalidResourceHandle : cudaErrorNotReady;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(to.time - from.time).count();
  return cudaSuccess;
}

// An event that was never recorded holds nobody up.
void wait_for_event(Stream& stream, Event& event) {
  if (wait_in_capture(stream, event)) {
    return;
  }
  order(stream);
  auto* told = watcher();
  if (told != nullptr && event.recorded) {
    told->stream_waits(stream.name, event.state);
  }
}

} // namespace standin

using namespace standin;

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return entry(__func__, [&] {
    *event = static_cast<cudaEvent_t>(create_event(cudaEventDefault));
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return entry(__func__, [&] {
    *event = static_cast<cudaEvent_t>(create_event(flags));
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return entry(__func__, [&] {
    destroy_event(event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const void* caller = __builtin_return_address(0);
  return entry(__func__, [&] {
    record_event(event_of(event), stream_of(stream), caller);
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  const void* caller = __builtin_return_address(0);
  return entry(__func__, [&] {
    if ((flags & ~cudaEventRecordExternal) != 0) {
      return cudaErrorInvalidValue;
    }
    record_event(event_of(event), stream_of(stream), caller);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return entry(__func__, [&] {
    if ((flags & ~cudaEventWaitExternal) != 0) {
      return cudaErrorInvalidValue;
    }
    wait_for_event(stream_of(stream), event_of(event));
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return entry(__func__, [&] {
    refuse_while_capturing();
    return event_is_done(event_of(event)) ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return entry(__func__, [&] {
    refuse_while_capturing();
    synchronize(event_of(event), "cudaEventSynchronize");
    return cudaSuccess;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return entry(__func__, [&] { return elapsed(milliseconds, event_of(from), event_of(to)); });
}
