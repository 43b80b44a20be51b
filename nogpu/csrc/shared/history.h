// What the clocks store: which launches a stream or thread knows to be complete, and the accesses to a block of memory.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace simulated {

using StreamNumber = uint32_t;

// For each stream, the number of its last launch that is known to be complete.
class Clock {
 public:
  uint64_t operator[](StreamNumber stream) const {
    return stream < ticks_.size() ? ticks_[stream] : 0;
  }
  size_t size() const {
    return ticks_.size();
  }
  uint64_t tick(StreamNumber stream);
  void raise(StreamNumber stream, uint64_t tick);
  void join(const Clock& other);
  // True if this clock knows everything that the other one knows.
  bool covers(const Clock& other) const;

 private:
  std::vector<uint64_t> ticks_;
};

struct Launch {
  std::string op;
  std::string stack; // of Python, where stacks are kept
  std::atomic<bool> failed{false}; // the operator raised, so the launch has accessed nothing
};

struct Span {
  size_t begin = 0; // in bytes from the start of the block
  size_t end = 0;
};

// Many runs of bytes of equal length at regular distances, such as the columns of a large matrix. A history keeps them
// as one span from the first byte to the last. Single runs are compared only where that span meets another access.
struct Runs {
  size_t begin = 0;
  size_t length = 0;
  c10::SmallVector<std::pair<size_t, size_t>, 4> steps; // distance in bytes, and count
  std::vector<Span> spans() const;
};

// An access by a launch. An access with tick 0 is ordered before everything.
struct Access {
  StreamNumber stream = 0;
  uint64_t tick = 0;
  std::shared_ptr<Launch> launch;
  std::shared_ptr<const Runs> runs; // null for the whole span
  bool is_before_free = false; // the memory has gone back to an allocator since, which nothing has ordered after it
};

// For every byte of a block, the last write and the reads since that write.
class History {
 public:
  struct Segment {
    size_t end = 0;
    Access write;
    c10::SmallVector<Access, 1> reads; // the last read of each stream
  };
  using Segments = std::map<size_t, Segment>; // by their first byte; they do not overlap

  // Splits and adds segments until they cover `span` exactly, and returns these. Valid until the next call.
  std::pair<Segments::iterator, Segments::iterator> within(Span span);
  // Replaces all segments within `span` by one with this write.
  void write(Span span, Access access);
  void start_with(size_t bytes, Access write);
  const Segments& segments() const {
    return segments_;
  }

 private:
  Segments::iterator cut_at(size_t position);
  Segments segments_;
};

// An access to memory that was freed before the access was known to be complete.
struct Debt {
  Access access;
  bool write = false;
  Span span;
  const char* where = "";
  // Another thread of the same backward has taken memory from the same stream, and could have been given this memory.
  bool is_contested = false;
};

// The last access of a stream to any memory of another device's block.
struct PeerAccess {
  Access access;
  bool write = false;
  Span span;
  const char* where = "";
};

using PeerAccesses = c10::SmallVector<PeerAccess, 1>;

// What the clocks store with each block of memory.
struct Tracked {
  History history;
  int8_t device = -1; // -1 for memory of the host
  PeerAccesses by_peers; // also those that later work of the device itself comes after
  // The stream that the block was allocated on and returns to. Empty if the clocks were off at the allocation.
  std::optional<StreamNumber> home;
  c10::SmallVector<StreamNumber, 1> recorded; // by record_stream: freeing waits for these streams
  std::vector<Debt> inherited; // of earlier blocks that may have had the same memory
  const char* where = ""; // "sim:1" or "pinned host memory"
};

struct Touch {
  Tracked* block;
  c10::SmallVector<Span, 1> spans;
  bool write;
  const char* argument;
  std::shared_ptr<const Runs> runs; // within the only span; null for all of each span
};

} // namespace simulated
