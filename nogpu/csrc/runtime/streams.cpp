// Streams: handles, the implicit waits of the legacy default stream, and waits of the host.
//
// A stream stays in memory until the process ends, so a handle of a destroyed one is recognised, and a number is never
// used again.
#include "capturing.h"
#include "properties.h"

namespace standin {

namespace {

std::atomic<bool> skipping{false};

constexpr uintptr_t kTag = uintptr_t{0x57} << 56; // no address of a program has it
constexpr size_t kChunk = 1024;
constexpr size_t kChunks = 1 << 14;

// Streams by number, from 1. Read without a lock.
std::atomic<Stream*> chunks[kChunks];
std::mutex adding;
uint32_t last_number = 0;

Stream* find(uintptr_t number) {
  if (number == 0 || number >= kChunk * kChunks) {
    return nullptr;
  }
  auto* chunk = chunks[number / kChunk].load(std::memory_order_acquire);
  return chunk == nullptr || chunk[number % kChunk].name.number == 0 ? nullptr : &chunk[number % kChunk];
}

Stream& add(Device& device, unsigned flags, int priority) {
  Stream* stream = nullptr;
  {
    const std::lock_guard<std::mutex> guard(adding);
    const auto number = last_number + 1;
    if (number >= kChunk * kChunks) {
      throw Refused{cudaErrorMemoryAllocation};
    }
    auto& chunk = chunks[number / kChunk];
    if (chunk == nullptr) {
      chunk = new Stream[kChunk];
    }
    last_number = number;
    stream = &chunk.load()[number % kChunk];
    stream->name = {device.index, number};
  }
  stream->flags = flags;
  stream->blocking = (flags & cudaStreamNonBlocking) == 0;
  stream->priority = std::max(kGreatestPriority, std::min(kLeastPriority, priority));
  if (stream->blocking) {
    const std::lock_guard<std::mutex> guard(device.lock);
    device.blocking.push_back(stream);
  }
  return *stream;
}

Stream& per_thread(Device& device) {
  auto& streams = this_thread().streams;
  const auto index = static_cast<size_t>(device.index);
  if (streams.size() <= index) {
    streams.resize(index + 1, nullptr);
  }
  if (streams[index] == nullptr) {
    streams[index] = &add(device, cudaStreamDefault, 0);
  }
  return *streams[index];
}

// Streams that the legacy one has to wait for. Those that were destroyed leave the list here.
std::vector<StreamName> before_legacy(Device& device) {
  std::vector<StreamName> result;
  const std::lock_guard<std::mutex> guard(device.lock);
  auto kept = device.blocking.begin();
  for (auto* stream : device.blocking) {
    const uint64_t actions = stream->actions;
    if (stream->seen_by_legacy != actions) {
      stream->seen_by_legacy = actions;
      result.push_back(stream->name);
    }
    if (stream->alive) {
      *kept++ = stream;
    }
  }
  device.blocking.erase(kept, device.blocking.end());
  ++device.legacy.actions;
  return result;
}

bool waits_for_legacy(Device& device, Stream& stream) {
  const std::lock_guard<std::mutex> guard(device.lock);
  ++stream.actions;
  return std::exchange(stream.legacy_seen, device.legacy.actions) != device.legacy.actions;
}

} // namespace

Stream& stream_of(void* handle) {
  const auto value = reinterpret_cast<uintptr_t>(handle);
  if (handle == nullptr || handle == cudaStreamLegacy) {
    return context_here().legacy;
  }
  if (handle == cudaStreamPerThread) {
    return per_thread(context_here());
  }
  auto* stream = value >> 56 == kTag >> 56 && value % 16 == 0 ? find((value & ~kTag) / 16) : nullptr;
  if (stream == nullptr || !stream->alive) {
    throw Refused{cudaErrorInvalidResourceHandle};
  }
  return *stream;
}

Stream& stream_named(StreamName name) {
  if (name.number == 0) {
    return device_at(name.device).legacy;
  }
  auto* stream = find(name.number);
  if (stream == nullptr) {
    throw Refused{cudaErrorInvalidResourceHandle};
  }
  return *stream;
}

StreamName name_of(void* stream) {
  try {
    return stream_of(stream).name;
  } catch (const Refused&) {
    throw std::invalid_argument("there is no such stream, or it was destroyed");
  }
}

void* create_stream(unsigned flags, int priority) {
  if ((flags & ~cudaStreamNonBlocking) != 0) {
    throw Refused{cudaErrorInvalidValue};
  }
  return reinterpret_cast<void*>(kTag | uintptr_t{add(context_here(), flags, priority).name.number} * 16);
}

void destroy_stream(void* handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    throw Refused{cudaErrorInvalidResourceHandle};
  }
  if (!stream_of(handle).alive.exchange(false)) {
    throw Refused{cudaErrorInvalidResourceHandle};
  }
}

void order(Stream& stream) {
  if (is_capturing(stream)) {
    return; // what is captured comes after what its launch comes after
  }
  if (!stream.blocking && stream.name.number != 0) {
    return;
  }
  auto& device = device_at(stream.name.device);
  if (stream.name.number == 0) {
    for (const auto earlier : before_legacy(device)) {
      let_wait(stream.name, earlier);
    }
  } else if (waits_for_legacy(device, stream)) {
    let_wait(stream.name, device.legacy.name);
  }
}

void let_wait(StreamName later, StreamName earlier) {
  if (auto* told = watcher()) {
    told->stream_waits_for_stream(later, earlier);
  }
}

void wait_for_stream(Stream& stream, const char* call) {
  refuse_if_captured(stream);
  if (stream.name.number == 0) {
    order(stream);
  }
  count_host_wait();
  if (auto* told = watcher()) {
    told->host_waited_for_stream(stream.name, call);
  }
}

bool stream_is_done(Stream& stream) {
  refuse_if_captured(stream);
  auto* told = watcher();
  return told == nullptr || told->host_asks_stream(stream.name);
}

void wait_for_device(int device, const char* call) {
  count_host_wait();
  if (auto* told = watcher()) {
    told->host_waited_for_device(device, call);
  }
}

void set_skipping(bool skips) {
  skipping = skips;
}

bool is_skipping() {
  return skipping;
}

void in_turn(StreamName name, std::function<void()> work) {
  auto& stream = stream_named(name);
  if (is_capturing(stream)) {
    keep_work(stream, std::move(work));
  } else if (!skipping) {
    work();
  }
}

std::string announce(StreamName name, const char* what, const Part* parts, size_t count, const CopyInfo* copy,
                     Turn turn) {
  try {
    return announce_or_refuse(name, what, parts, count, copy, turn);
  } catch (const Refused& refused) {
    this_thread().last = refused.error;
    return cudaGetErrorString(refused.error);
  }
}

std::string announce_or_refuse(StreamName name, const char* what, const Part* parts, size_t count,
                               const CopyInfo* copy, Turn turn) {
  auto& stream = stream_named(name);
  if (is_capturing(stream)) {
    auto wrong = keep(stream, what, parts, count, copy, turn);
    if (!wrong.empty()) {
      keep_untold(wrong);
    }
    return wrong;
  }
  refuse_legacy_work(stream);
  order(stream);
  auto* told = watcher();
  auto wrong = told == nullptr ? std::string() : told->launch(name, what, parts, count, copy);
  if (!wrong.empty()) {
    keep_untold(wrong);
  }
  return wrong;
}

} // namespace standin
