// Vector clocks: they record which accesses to memory are ordered after which others.
//
// Simulated devices run each operator at once, so a missing wait never damages data here. The clocks know what would be
// ordered on a real accelerator: a stream runs its operators one after the other, events and stream waits order
// streams, and what a host thread has waited for comes before everything that the thread launches later. An access that
// nothing orders after an earlier conflicting one raises, in every run, whatever the timing. This file knows streams,
// blocks of memory and byte spans, but no tensors.
//
// The model of reads and writes follows torch.cuda._sanitizer; the clocks are those of Mattern, "Virtual time and
// global states of distributed systems" (1989).
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>

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
  uint64_t tick(StreamNumber stream);
  void join(const Clock& other);

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

// What the clocks store with each block of memory.
struct Tracked {
  History history;
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

struct Event {
  Clock clock;
  bool recorded = false;
  int64_t nanoseconds = 0;
};

// What a host thread has waited for. torch carries it into the autograd engine's threads, with the rest of its
// thread-local state. The threads that work for one backward share it with each other and with the caller.
struct Knowledge final : c10::DebugInfoBase, std::enable_shared_from_this<Knowledge> {
  Clock clock;
};

namespace clocks {

bool enabled();
void enable(bool on);
void keep_stacks(bool on);
bool stacks_kept();
void set_stack_reader(std::string (*reader)());
// The reader returns the number of the backward that the calling thread works for, or -1.
void set_backward_reader(int (*reader)());

// A launch that has been recorded. False if the clocks were off.
struct Ticket {
  Access access;
  explicit operator bool() const {
    return access.launch != nullptr;
  }
  // The operator raised, so the launch has accessed nothing.
  void failed() const {
    if (access.launch) {
      access.launch->failed = true;
    }
  }
};
// Records a launch on `stream`. With `joined`, the launch is also ordered after the earlier work on `joined`, and
// before the later work: a copy between devices passes their two current streams. Throws c10::Error for an access that
// is not ordered.
Ticket launch(c10::Stream stream, const std::string& op, c10::ArrayRef<Touch> touches,
              std::optional<c10::Stream> joined = std::nullopt);
// Records that the launch itself has allocated and written the block.
void wrote(const Ticket& ticket, Tracked& block, size_t bytes);

// Freed memory returns to the stream that it was allocated on, and that stream may reuse it at once. If an access by
// another stream is not known to be complete at that time, the next write to the memory is a hazard.
//
// The threads of one backward run at the same time, and their speed must not decide which hazards are found. Another
// thread of the same backward may already have taken memory from that stream, and could have been given this memory.
// That is a hazard too, unless its allocation is known to come before the free. The engine orders streams wherever it
// passes a gradient from one thread to another. So two clocks show which allocations come before the free: that of the
// stream that used the memory, and that of `node`, the stream that the freeing thread works on.
void allocated(Tracked& block, size_t bytes, c10::Stream home);
void freed(Tracked& block, c10::Stream node);
void used_on(Tracked& block, c10::Stream stream);

void record(Event& event, c10::Stream stream);
void wait(c10::Stream stream, const Event& event);
void host_waits(const Event& event);
void host_waits(c10::Stream stream);
void host_waits_for_device(c10::DeviceIndex device);

// Throws if memory was freed while another stream might still use it, and the calling thread has not waited for that
// stream since. Reports the first such access and forgets the others. Without this call, the next use of the memory
// throws.
void check();

std::shared_ptr<Knowledge> knowledge();
// A copy of the calling thread's knowledge. Later waits do not change it.
std::shared_ptr<Knowledge> snapshot();
// `learn` adds `from` to the calling thread's knowledge; `tell` adds the calling thread's knowledge to `to`.
void learn(const Knowledge& from);
void tell(Knowledge& to);
// Called at the start of a thread, which then knows what `parent` knows. From now on the engine's threads that work for
// this thread share its knowledge.
void enter_thread(const Knowledge* parent);

} // namespace clocks
} // namespace simulated
