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
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "history.h"
#include "recorder.h"

namespace simulated {

struct Event {
  Clock clock;
  bool recorded = false;
  int64_t nanoseconds = 0;
};

// What a host thread has waited for. torch carries it into the autograd engine's threads, with the rest of its
// thread-local state. The threads that work for one backward share it with each other and with the caller.
struct Knowledge final : c10::DebugInfoBase, std::enable_shared_from_this<Knowledge> {
  Clock clock;
  Issued issued;
  bool is_followed = false; // Python has told how the thread was started
  std::shared_ptr<Knowledge> before; // see `host_function_begins`
};

namespace clocks {

bool enabled();
void enable(bool on);
void keep_stacks(bool on);
void set_stack_reader(std::string (*reader)());
// The reader returns the number of the backward that the calling thread works for, or -1.
void set_backward_reader(int (*reader)());

// A launch that has been captured. The clocks learn of it when its graph is launched.
struct KeptLaunch {
  std::string op;
  c10::SmallVector<Touch, 4> touches;
  Work work;
  bool is_done = false;
};

// A launch that the clocks know. False if they were off, or if it is kept.
struct Ticket {
  Access access;
  std::shared_ptr<KeptLaunch> kept;
  uint64_t entry = 0; // its number in the recorder, or 0
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
// Tells the recorder that the launch was one, and what it did.
void done(const Ticket& ticket, Work&& work);
// Returns a message if the calling host thread touches memory that a stream may still use.
std::string host_touches(const std::string& op, c10::ArrayRef<Touch> touches);
// Records that the launch itself has allocated and written the block.
void wrote(const Ticket& ticket, Tracked& block, size_t bytes);
// Records that the launch touches more than was known when it was made. Throws c10::Error as `launch` does.
void touches(const Ticket& ticket, const std::string& op, c10::ArrayRef<Touch> touches);

// The calling thread begins or ends one call of the host that makes all launches in between: that of a graph.
void launches_graph(bool begins);

// Records up to `limit` launches, with their Python stacks if `stacks` is true.
void start_recording(size_t limit, bool stacks);
Recorded stop_recording();

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

// The same where an allocator keeps the memory of several blocks in one, as torch's does on CUDA. It gives bytes out for
// work on `home`: earlier launches of that stream may have used them.
void taken(Tracked& block, Span span, c10::Stream home);
// They return to `home`. Accesses that the calling thread knows to be complete are forgotten: whoever gets the bytes next
// need not know of them. So are those in `also`, what the allocator itself has waited for. Others are hazards.
void given_back(Tracked& block, Span span, c10::Stream home, const Clock& also);
// The whole block ceases to exist. Returns a message if a stream may still use it, for all that the calling thread knows.
std::string gone(const Tracked& block);
// The same for streams of other devices only, before the host has waited for the block's own one.
std::string gone_for_peers(const Tracked& block);
// Allocators end all memory that has been `freed`. Throws c10::Error if a stream of another device may still use some.
void allocators_let_go();
// An allocator of the host hands the bytes on. What any thread has waited for is over for the next owner.
void handed_on(Tracked& block, Span span);

void record(Event& event, c10::Stream stream);
void wait(c10::Stream stream, const Event& event);
// `later` waits for what `earlier` has been given so far.
void wait(c10::Stream later, c10::Stream earlier);
void host_waits(const Event& event);
void host_waits(c10::Stream stream);
// True if the calling thread knows that what the event has recorded is complete.
bool host_knows(const Event& event);
bool host_knows(c10::Stream stream);
// As `host_waits`, where nothing had to be waited for.
void host_asks(const Event& event);
void host_asks(c10::Stream stream);
// An allocator of the host has asked, and hands the memory on.
void allocator_asks(const Event& event);
void host_waits_for_device(c10::DeviceIndex device);

// The calling thread runs a function of the program in the place of a driver's thread, which knows only what the stream
// has done. Later work of the stream comes after the function.
void host_function_begins(c10::Stream stream);
void host_function_ends(c10::Stream stream);

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
