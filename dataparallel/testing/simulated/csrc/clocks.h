// Vector clocks: which access to which memory is ordered after which other one.
//
// Operators run at once here, so nothing ever goes wrong by itself. This file knows what would be ordered on a real
// accelerator: a stream's operators among themselves, events and stream waits between streams, and what a host thread
// has waited for before everything that it launches later. An access that nothing orders after an earlier conflicting
// one is refused, in every run, whatever the timing. It knows streams, blocks and byte spans; no tensor.
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

// For each stream, the last of its launches that is known to be over.
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
  std::string stack; // Python's, if asked for
  std::atomic<bool> failed{false}; // then it has touched nothing
};

struct Span {
  size_t begin = 0; // bytes from the start of the block
  size_t end = 0;
};

// Many equal runs of bytes at regular distances, such as the columns of a large matrix. They are kept as one span from
// the first to the last, and looked at singly where that span meets another one.
struct Runs {
  size_t begin = 0;
  size_t length = 0;
  c10::SmallVector<std::pair<size_t, size_t>, 4> steps; // distance in bytes, how many
  std::vector<Span> spans() const;
};

// An access by a launch; a tick of 0 is ordered before everything.
struct Access {
  StreamNumber stream = 0;
  uint64_t tick = 0;
  std::shared_ptr<Launch> launch;
  std::shared_ptr<const Runs> runs; // if not the whole span
};

// The last write of every byte of a block, and the reads since.
class History {
 public:
  struct Segment {
    size_t end = 0;
    Access write;
    c10::SmallVector<Access, 1> reads; // at most one per stream: the last
  };
  using Segments = std::map<size_t, Segment>; // by the first byte; disjoint

  // The segments within `span`, cut and filled up so that they cover it exactly. Valid until the next call.
  std::pair<Segments::iterator, Segments::iterator> within(Span span);
  // One segment instead of those.
  void write(Span span, Access access);
  void start_with(size_t bytes, Access write);
  const Segments& segments() const {
    return segments_;
  }

 private:
  Segments::iterator cut_at(size_t position);
  Segments segments_;
};

// An access to memory that has been freed since.
struct Debt {
  Access access;
  bool write = false;
  Span span;
  const char* where = "";
  // Another thread has taken memory from the same stream meanwhile, and could as well have been given this.
  bool is_contested = false;
};

// What the clocks keep with a block of memory.
struct Tracked {
  History history;
  // The stream that it was allocated on, and goes back to; unknown if the clocks were off then.
  std::optional<StreamNumber> home;
  c10::SmallVector<StreamNumber, 1> recorded; // record_stream: freeing waits for these
  std::vector<Debt> inherited; // of what may have had this memory before
  const char* where = ""; // "sim:1", "pinned host memory"
};

struct Touch {
  Tracked* block;
  c10::SmallVector<Span, 1> spans;
  bool write;
  const char* argument;
  std::shared_ptr<const Runs> runs; // within the only span, if not all of it
};

struct Event {
  Clock clock;
  bool recorded = false;
  int64_t nanoseconds = 0;
};

// What a host thread has waited for. It travels with torch's thread-local state, so into the autograd engine's threads:
// those that work for one backward share it with each other and with its caller.
struct Knowledge final : c10::DebugInfoBase, std::enable_shared_from_this<Knowledge> {
  Clock clock;
};

namespace clocks {

bool enabled();
void enable(bool on);
void keep_stacks(bool on);
bool stacks_kept();
void set_stack_reader(std::string (*reader)());
// Tells the number of the backward that the calling thread works for, or -1.
void set_backward_reader(int (*reader)());

// A launch on `stream`, also ordered after the work on `joined` so far, which then is ordered after it (the two current
// streams of a cross-device copy). Throws c10::Error for an access that is not ordered.
struct Ticket {
  Access access;
  explicit operator bool() const {
    return access.launch != nullptr;
  }
  // The operator has raised instead.
  void failed() const {
    if (access.launch) {
      access.launch->failed = true;
    }
  }
};
Ticket launch(c10::Stream stream, const std::string& op, c10::ArrayRef<Touch> touches,
              std::optional<c10::Stream> joined = std::nullopt);
// Memory that the launch itself has made.
void wrote(const Ticket& ticket, Tracked& block, size_t bytes);

// Memory goes back to the stream that it was made on, and may be given out there at once. What other streams are not
// known to have done with it then is a hazard for whoever writes there next.
//
// The threads of one backward run beside each other, and which of them is faster must not decide what is found: in such
// a thread it is also a hazard for memory that another one has already taken there, if nothing says that it was before.
// The engine orders streams wherever it hands a gradient from thread to thread, so the clocks of the stream that used
// the memory and of `node`, the one that the freeing thread works on, tell what was before.
void allocated(Tracked& block, size_t bytes, c10::Stream home);
void freed(Tracked& block, c10::Stream node);
void used_on(Tracked& block, c10::Stream stream);

void record(Event& event, c10::Stream stream);
void wait(c10::Stream stream, const Event& event);
void host_waits(const Event& event);
void host_waits(c10::Stream stream);
void host_waits_for_device(c10::DeviceIndex device);

// Memory that was freed while another stream may still use it, and that the calling thread has not waited for: throws,
// once. Without that, using the memory again throws.
void check();

std::shared_ptr<Knowledge> knowledge();
// A copy, to which nothing is added later.
std::shared_ptr<Knowledge> snapshot();
// The calling thread learns what the other one knows, or the other way round.
void learn(const Knowledge& from);
void tell(Knowledge& to);
// From now on this thread's knowledge is shared with the engine's threads that work for it.
void enter_thread(const Knowledge* parent);

} // namespace clocks
} // namespace simulated
