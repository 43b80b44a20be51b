#include "watch.h"

#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "allocators.h"
#include "ceilings.h"
#include "counts.h"
#include "front.h"
#include "host.h"
#include "labels.h"
#include "stream_name.h"
#include "waits.h"

namespace simulated {
namespace {

std::atomic<bool> answers_late{false};

// The launch of an operator on its way through the runtime.
struct OnTheWay {
  c10::ArrayRef<Touch> touches;
  clocks::Ticket ticket;
};
thread_local OnTheWay* on_the_way = nullptr;

// The memory of an allocation. A captured launch that touches it may come after its end.
struct OfAllocation : Tracked {
  std::atomic<bool> is_freed{false};
};

std::atomic<size_t> kept_launches{0};

struct CountedLaunch : clocks::KeptLaunch {
  CountedLaunch() {
    ++kept_launches;
  }
  ~CountedLaunch() {
    --kept_launches;
  }
};

// What was freed while there were captured launches stays until there are none.
void let_go(std::unique_ptr<OfAllocation> memory) {
  static std::mutex lock;
  static auto& freed = *new std::vector<std::unique_ptr<OfAllocation>>;
  const std::lock_guard<std::mutex> guard(lock);
  if (kept_launches == 0) {
    freed.clear();
    return;
  }
  memory->history = {};
  memory->is_freed = true;
  freed.push_back(std::move(memory));
}

struct Recorded : Event {
  bool is_of_allocator = false;
};

Recorded& event_in(const standin::EventState& state) {
  return *static_cast<Recorded*>(state.watched);
}

// torch's allocator frees memory with its lock held, which a thread with the interpreter lock may wait for.
bool may_ask_python(const char* call) {
  return std::strncmp(call, "cudaFree", 8) != 0;
}

Tracked* tracked(const standin::Memory& memory) {
  return static_cast<Tracked*>(memory.watched);
}

// What an operator on its way touches, and these parts.
void add_touches(c10::SmallVector<Touch, 4>& touches, const standin::Part* parts, size_t count) {
  if (on_the_way) {
    touches.append(on_the_way->touches.begin(), on_the_way->touches.end());
  }
  for (size_t i = 0; i < count; ++i) {
    if (parts[i].memory && tracked(*parts[i].memory)) {
      touches.push_back(
          {tracked(*parts[i].memory), {{parts[i].begin, parts[i].end}}, parts[i].writes, parts[i].argument, nullptr});
    }
  }
}

// What the runtime does by itself: a copy, or a kernel that no operator has counted.
Work work_of(standin::StreamName stream, const char* name, const standin::Part* parts, size_t count,
             const standin::CopyInfo* copy) {
  Work work;
  work.moved(name, copy ? copy->bytes : 0, copy ? copy->from : stream.device, copy ? copy->to : stream.device);
  for (size_t i = 0; !copy && i < count; ++i) {
    if (parts[i].memory) {
      work.accessed(stream.device, parts[i].memory->device, parts[i].end - parts[i].begin, parts[i].writes);
    }
  }
  return work;
}

std::array<std::atomic<uint64_t>, kCeiling> in_graphs{};

std::string launch_kept(const clocks::KeptLaunch& kept, standin::StreamName stream) {
  for (const auto& touch : kept.touches) {
    if (static_cast<const OfAllocation*>(touch.block)->is_freed) {
      return "a graph was launched whose " + kept.op + " touches memory that has been freed since it was captured";
    }
  }
  auto work = kept.work.again();
  clocks::Ticket ticket;
  try {
    ticket = clocks::launch(stream_of(stream), kept.op, kept.touches);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  if (kept.is_done) {
    counts::launched(static_cast<c10::DeviceIndex>(stream.device));
    ++in_graphs[static_cast<size_t>(stream.device)];
    if (kept.work.copy) {
      counts::copied(kept.work.copy->source, kept.work.copy->target, kept.work.bytes_written);
    }
    clocks::done(ticket, std::move(work));
  }
  return "";
}

class ClockWatcher final : public standin::Watcher {
 public:
  std::string launch(standin::StreamName stream, const char* name, const standin::Part* parts, size_t count,
                     const standin::CopyInfo* copy) override {
    allocators::does_something_else();
    auto work = work_of(stream, name, parts, count, copy);
    c10::SmallVector<Touch, 4> touches;
    add_touches(touches, parts, count);
    clocks::Ticket ticket;
    try {
      ticket = clocks::launch(stream_of(stream), name, touches);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    if (on_the_way) {
      on_the_way->ticket = ticket;
      return "";
    }
    const auto device = static_cast<c10::DeviceIndex>(stream.device);
    counts::launched(device);
    if (copy) {
      counts::copied(static_cast<c10::DeviceIndex>(copy->from), static_cast<c10::DeviceIndex>(copy->to), copy->bytes);
    }
    clocks::done(ticket, std::move(work));
    return "";
  }

  std::function<std::string(standin::StreamName)> keep(standin::StreamName stream, const char* name,
                                                       const standin::Part* parts, size_t count,
                                                       const standin::CopyInfo* copy) override {
    auto kept = std::make_shared<CountedLaunch>();
    kept->op = name;
    add_touches(kept->touches, parts, count);
    if (on_the_way) {
      on_the_way->ticket.kept = kept;
    } else {
      kept->work = work_of(stream, name, parts, count, copy);
      kept->is_done = true;
    }
    return [kept](standin::StreamName launched_on) { return launch_kept(*kept, launched_on); };
  }

  void launches_graph(bool begins) override {
    clocks::launches_graph(begins);
  }

  void recorded(standin::EventState& event, standin::StreamName stream) override {
    if (!event.watched) {
      event.watched = new Recorded();
    }
    auto& made = event_in(event);
    clocks::record(made, stream_of(stream));
    made.is_of_allocator = allocators::has_recorded(event, made.clock);
  }
  void stream_waits(standin::StreamName stream, const standin::EventState& event) override {
    allocators::does_something_else();
    if (event.watched) {
      clocks::wait(stream_of(stream), event_in(event));
    }
  }
  void stream_waits_for_stream(standin::StreamName later, standin::StreamName earlier) override {
    clocks::wait(stream_of(later), stream_of(earlier));
  }
  void host_waited(const standin::EventState& event, const char* call) override {
    const bool is_of_allocator = event.watched && event_in(event).is_of_allocator;
    waits::noted(call, !is_of_allocator && !allocators::are_asking());
    if (event.watched) {
      clocks::host_waits(event_in(event));
    }
  }
  void host_waited_for_stream(standin::StreamName stream, const char* call) override {
    allocators::does_something_else();
    waits::noted(call, true);
    clocks::host_waits(stream_of(stream));
  }
  void host_waited_for_device(int device, const char* call) override {
    waits::noted(call, may_ask_python(call));
    clocks::host_waits_for_device(static_cast<c10::DeviceIndex>(device));
  }
  bool host_asks(const standin::EventState& event) override {
    const bool is_of_allocator = allocators::are_asking() || (event.watched && event_in(event).is_of_allocator);
    if (!event.watched || clocks::host_knows(event_in(event))) {
      return true;
    }
    if (answers_late) {
      return false;
    }
    if (is_of_allocator) {
      clocks::allocator_asks(event_in(event));
    } else {
      clocks::host_asks(event_in(event));
    }
    return true;
  }
  bool host_asks_stream(standin::StreamName stream) override {
    if (clocks::host_knows(stream_of(stream))) {
      return true;
    }
    if (answers_late) {
      return false;
    }
    clocks::host_asks(stream_of(stream));
    return true;
  }
  void host_function(standin::StreamName stream, bool begins) override {
    begins ? clocks::host_function_begins(stream_of(stream)) : clocks::host_function_ends(stream_of(stream));
  }

  void forget(standin::EventState& event) override {
    delete static_cast<Recorded*>(event.watched);
    event.watched = nullptr;
  }
  void allocated(standin::Memory& memory) override {
    auto* made = new OfAllocation();
    made->where = memory.device < 0 ? "pinned host memory" : label_of(static_cast<c10::DeviceIndex>(memory.device));
    made->device = static_cast<c10::DeviceIndex>(memory.device);
    memory.watched = static_cast<Tracked*>(made);
  }
  void freeing(standin::Memory& memory) override {
    if (!memory.watched) {
      return;
    }
    if (auto problem = clocks::gone_for_peers(*tracked(memory)); !problem.empty()) {
      tracked(memory)->history = {}; // `freed` would name the same
      keep_host_problem(std::move(problem));
    }
  }
  void freed(standin::Memory& memory) override {
    if (!memory.watched) {
      return;
    }
    if (auto problem = clocks::gone(*tracked(memory)); !problem.empty()) {
      keep_host_problem(std::move(problem));
    }
    let_go(std::unique_ptr<OfAllocation>(static_cast<OfAllocation*>(tracked(memory))));
    memory.watched = nullptr;
  }
};

} // namespace

clocks::Ticket launch_on(standin::StreamName stream, const std::string& op, c10::ArrayRef<Touch> touches,
                         standin::Turn turn) {
  OnTheWay way{touches, {}};
  auto* const before = std::exchange(on_the_way, &way);
  const auto restore = c10::make_scope_exit([&] { on_the_way = before; });
  if (const auto problem = standin::announce(stream, op.c_str(), nullptr, 0, nullptr, turn); !problem.empty()) {
    standin::has_told(problem);
    if (cudaPeekAtLastError() != cudaSuccess && problem == cudaGetErrorString(cudaPeekAtLastError())) {
      C10_CUDA_CHECK(cudaGetLastError());
    }
    TORCH_CHECK(false, problem);
  }
  return way.ticket;
}

std::vector<uint64_t> launches_in_graphs() {
  return {in_graphs.begin(), in_graphs.end()};
}

void answer_queries_late(bool late) {
  answers_late = late;
}

void watch_runtime() {
  static auto* the = new ClockWatcher();
  standin::watch(the);
  note_also_where(&front::is_capturing);
}

} // namespace simulated
