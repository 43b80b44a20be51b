#include "clocks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

#include "ceilings.h"
#include "keys.h"
#include "process_state.h"
#include "races.h"

namespace simulated::clocks {
namespace {

struct State : Streams {
  // Guards this object, every Tracked and every Knowledge. Nothing of torch or Python is called while it is held.
  std::mutex mutex;
  std::array<std::vector<int32_t>, kCeiling> numbers; // by device and id; -1 where there is none
  Recorder recorder;
};

State& state() {
  return process_state<State>();
}

std::atomic<bool> is_enabled{true};
std::atomic<std::string (*)()> stack_reader{nullptr};
std::atomic<int (*)()> backward_reader{nullptr};
thread_local std::shared_ptr<Knowledge> own_knowledge;
const auto kKind = c10::DebugInfoKind::TEST_INFO_2;

thread_local std::shared_ptr<Knowledge> of_stream; // while the thread stands in for a driver's thread

Knowledge& here() {
  if (of_stream) {
    return *of_stream;
  }
  if (auto* shared = dynamic_cast<Knowledge*>(c10::ThreadLocalDebugInfo::get(kKind))) {
    return *shared;
  }
  // Only below torch's own entries: torch removes its entry from the top, where this one must not be.
  if (!c10::ThreadLocalDebugInfo::current()) {
    auto made = std::make_shared<Knowledge>();
    c10::ThreadLocalDebugInfo::_push(kKind, made);
    return *made;
  }
  if (!own_knowledge) {
    own_knowledge = std::make_shared<Knowledge>();
  }
  return *own_knowledge;
}

// Call it before the mutex is taken: an error message takes long to build.
void check_stream(c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == kDevice && stream.id() >= 0, "expected a stream of ", kOneDevice,
              "; got stream ", stream.id(), " of ", stream.device().str());
}

StreamNumber number_of(State& s, c10::Stream stream) {
  auto& numbers = s.numbers.at(static_cast<size_t>(stream.device_index()));
  const auto id = static_cast<size_t>(stream.id());
  if (id >= numbers.size()) {
    numbers.resize(id + 1, -1);
  }
  auto& number = numbers[id];
  if (number < 0) {
    number = static_cast<int32_t>(s.clocks.size());
    s.clocks.emplace_back();
    s.debts.emplace_back();
    s.taken.emplace_back();
    s.names.push_back(stream);
  }
  return static_cast<StreamNumber>(number);
}

void host_knows_now(State& s, const Clock& clock) {
  here().clock.join(clock);
  s.anybody.join(clock);
}

Worker this_worker() {
  auto* const reader = backward_reader.load();
  return {std::this_thread::get_id(), reader ? (*reader)() : -1};
}

bool is_in_backward() {
  return this_worker().backward >= 0;
}

} // namespace

bool enabled() {
  return is_enabled.load(std::memory_order_relaxed);
}

void enable(bool on) {
  is_enabled = on;
}

void keep_stacks(bool on) {
  state().keeps_stacks = on;
}

void set_stack_reader(std::string (*reader)()) {
  stack_reader = reader;
}

void set_backward_reader(int (*reader)()) {
  backward_reader = reader;
}

Ticket launch(c10::Stream stream, const std::string& op, c10::ArrayRef<Touch> touches,
              std::optional<c10::Stream> joined) {
  const bool watched = enabled();
  const bool recorded = is_recording();
  if (!watched && !recorded && !joined) {
    return {};
  }
  auto& s = state();
  auto record = std::make_shared<Launch>();
  record->op = op;
  if (((watched && s.keeps_stacks) || (recorded && recorder_keeps_stacks())) && stack_reader) {
    record->stack = (*stack_reader)(); // takes the GIL, so the mutex must not be held here
  }
  const bool in_backward = recorded && is_in_backward();
  std::string problem;
  Ticket ticket;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    const auto number = number_of(s, stream);
    const auto other = joined ? number_of(s, *joined) : number;
    auto& clock = s.clocks[number];
    auto& known = here();
    clock.join(known.clock);
    clock.join(s.clocks[other]);
    if (joined) {
      s.recorder.stream_waits(number, s.clocks[other]);
    }
    const auto tick = watched || recorded ? clock.tick(number) : 0;
    if (watched) {
      ticket.access = {number, tick, record, nullptr};
      problem = races::touch_all(s, clock, op, touches, ticket.access);
    }
    if (recorded && problem.empty()) {
      ticket.entry = s.recorder.issue(number, other != number ? std::optional(other) : std::nullopt, clock, known.clock,
                                      known.issued, in_backward, record->stack);
    }
    // Also while the clocks are off, as with events: the order is needed when they are on again.
    s.clocks[other].join(clock);
    if (joined) {
      s.recorder.stream_waits(other, clock);
    }
  }
  if (!problem.empty()) {
    ticket.failed();
    TORCH_CHECK(false, problem);
  }
  return ticket;
}

void done(const Ticket& ticket, Work&& work) {
  if (ticket.kept) {
    ticket.kept->work = std::move(work);
    ticket.kept->is_done = true;
    return;
  }
  if (ticket.entry && work.is_recorded) {
    auto& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    s.recorder.done(ticket.entry, std::move(work));
  }
}

void launches_graph(bool begins) {
  if (!is_recording()) {
    return;
  }
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  begins ? s.recorder.graph_begins() : s.recorder.graph_ends();
}

void start_recording(size_t limit, bool stacks) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.recorder.start(limit, stacks);
}

Recorded stop_recording() {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  auto recorded = s.recorder.stop();
  recorded.streams = s.names;
  return recorded;
}

void wrote(const Ticket& ticket, Tracked& block, size_t bytes) {
  if (!ticket) {
    return;
  }
  const auto worker = this_worker();
  auto& s = state();
  std::string problem;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    const auto home = ticket.access.stream;
    block.home = home;
    block.history.start_with(bytes, ticket.access);
    races::took(s, home, ticket.access.tick, worker);
    if (s.has_debts) {
      if (const auto* debt = races::pending(s, home, here().clock)) {
        problem = races::freed_too_early(s, *debt, home);
        s.debts[home].clear();
      }
    }
  }
  TORCH_CHECK(problem.empty(), problem);
}

void touches(const Ticket& ticket, const std::string& op, c10::ArrayRef<Touch> touches) {
  if (ticket.kept) {
    ticket.kept->touches.append(touches.begin(), touches.end());
  }
  if (!ticket) {
    return;
  }
  auto& s = state();
  std::string problem;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    problem = races::touch_all(s, s.clocks[ticket.access.stream], op, touches, ticket.access);
  }
  TORCH_CHECK(problem.empty(), problem);
}

std::string host_touches(const std::string& op, c10::ArrayRef<Touch> touches) {
  if (!enabled()) {
    return "";
  }
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  // Nobody tells who gave work to a thread of C++, such as those of process groups. It may know what anybody knows.
  const auto& known = here();
  return races::host_touches(s, known.is_followed ? known.clock : s.anybody, op, touches);
}

void taken(Tracked& block, Span span, c10::Stream home) {
  if (!enabled()) {
    return;
  }
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto number = number_of(s, home);
  const auto [first, last] = block.history.within(span);
  for (auto found = first; found != last; ++found) {
    races::note_read(found->second, {number, s.clocks[number][number], nullptr, nullptr});
  }
}

void given_back(Tracked& block, Span span, c10::Stream home, const Clock& also) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto number = number_of(s, home);
  const auto& known = here().clock;
  const auto is_complete = [&](const Access& access) {
    return races::ordered(known, access) || races::ordered(also, access);
  };
  auto& peers = block.by_peers;
  peers.erase(std::remove_if(peers.begin(), peers.end(), [&](const auto& peer) { return is_complete(peer.access); }),
              peers.end());
  const auto [first, last] = block.history.within(span);
  for (auto found = first; found != last; ++found) {
    auto& segment = found->second;
    const Span where{found->first, segment.end};
    races::forget(segment, is_complete);
    const auto settle = [&](Access& access, bool write) {
      access.is_before_free = access.launch && !races::ordered(s.clocks[number], access);
      if (access.is_before_free && enabled()) {
        races::owe(s, number, {access, write, where, block.where, false});
      }
    };
    settle(segment.write, true);
    for (auto& read : segment.reads) {
      settle(read, false);
    }
  }
}

std::string gone(const Tracked& block) {
  if (!enabled()) {
    return "";
  }
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return races::gone(s, here().clock, block);
}

std::string gone_for_peers(const Tracked& block) {
  if (!enabled()) {
    return "";
  }
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return races::gone_for_peers(s, here().clock, block.by_peers);
}

void allocators_let_go() {
  auto& s = state();
  std::string problem;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    problem = races::gone_for_peers(s, here().clock, std::exchange(s.kept, {}));
  }
  TORCH_CHECK(problem.empty(), problem);
}

void handed_on(Tracked& block, Span span) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto [first, last] = block.history.within(span);
  for (auto found = first; found != last; ++found) {
    races::forget(found->second, [&](const Access& access) { return races::ordered(s.anybody, access); });
  }
}

void allocated(Tracked& block, size_t bytes, c10::Stream home) {
  if (!enabled()) {
    return;
  }
  const auto worker = this_worker();
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto number = number_of(s, home);
  block.home = number;
  // Earlier launches of the stream may have used the memory, so every access must be ordered after all of them.
  block.history.start_with(bytes, {number, s.clocks[number][number], nullptr, nullptr});
  races::took(s, number, s.clocks[number][number], worker);
  if (s.has_debts && races::pending(s, number, here().clock)) {
    block.inherited = s.debts[number];
  }
}

void freed(Tracked& block, c10::Stream node) {
  if (!enabled() || !block.home) {
    return;
  }
  const auto worker = this_worker();
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto& known = here().clock;
  const auto& of_node = s.clocks[number_of(s, node)]; // may reallocate s.clocks, so it comes before `home`
  const auto& home = s.clocks[*block.home];
  // The allocator waits for an event on each recorded stream, and so for what that stream has waited for.
  const auto is_waited_for = [&](const Access& access) {
    return races::ordered(known, access) ||
        std::any_of(block.recorded.begin(), block.recorded.end(), [&](StreamNumber recorded) {
             return recorded == access.stream || races::ordered(s.clocks[recorded], access);
           });
  };
  for (const auto& peer : block.by_peers) {
    if (!is_waited_for(peer.access)) {
      races::keep_latest(s.kept, peer);
    }
  }
  for (const auto& [begin, segment] : block.history.segments()) {
    const Span span{begin, segment.end};
    auto settle = [&](const Access& access, bool write) {
      if (!is_waited_for(access) && !races::ordered(home, access)) {
        const auto before = std::max(of_node[*block.home], s.clocks[access.stream][*block.home]);
        races::owe(s, *block.home,
                   {access, write, span, block.where, races::is_contested(s, *block.home, before, worker)});
      }
    };
    settle(segment.write, true);
    for (const auto& read : segment.reads) {
      settle(read, false);
    }
  }
}

void used_on(Tracked& block, c10::Stream stream) {
  check_stream(stream);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto number = number_of(s, stream);
  if (std::find(block.recorded.begin(), block.recorded.end(), number) == block.recorded.end()) {
    block.recorded.push_back(number);
  }
}

void record(Event& event, c10::Stream stream) {
  check_stream(stream);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  auto& clock = s.clocks[number_of(s, stream)];
  clock.join(here().clock);
  event.clock = clock;
  event.recorded = true;
  event.nanoseconds = std::chrono::steady_clock::now().time_since_epoch().count();
}

void wait(c10::Stream stream, const Event& event) {
  check_stream(stream);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto number = number_of(s, stream); // may reallocate s.clocks
  s.clocks[number].join(event.clock);
  s.recorder.stream_waits(number, event.clock);
}

void wait(c10::Stream later, c10::Stream earlier) {
  check_stream(later);
  check_stream(earlier);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto from = number_of(s, earlier), to = number_of(s, later); // may reallocate s.clocks
  s.clocks[to].join(s.clocks[from]);
  s.recorder.stream_waits(to, s.clocks[from]);
}

bool host_knows(const Event& event) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return here().clock.covers(event.clock);
}

bool host_knows(c10::Stream stream) {
  check_stream(stream);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return here().clock.covers(s.clocks[number_of(s, stream)]);
}

void host_waits(const Event& event) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  host_knows_now(s, event.clock);
}

void host_waits(c10::Stream stream) {
  check_stream(stream);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  host_knows_now(s, s.clocks[number_of(s, stream)]);
}

void host_asks(const Event& event) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.recorder.host_asks(here().clock, event.clock);
  host_knows_now(s, event.clock);
}

void host_asks(c10::Stream stream) {
  check_stream(stream);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto& answer = s.clocks[number_of(s, stream)];
  s.recorder.host_asks(here().clock, answer);
  host_knows_now(s, answer);
}

void allocator_asks(const Event& event) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.anybody.join(event.clock);
}

void host_waits_for_device(c10::DeviceIndex device) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (size_t i = 0; i < s.names.size(); ++i) {
    if (s.names[i].device_index() == device) {
      host_knows_now(s, s.clocks[i]);
    }
  }
}

void host_function_begins(c10::Stream stream) {
  auto known = std::make_shared<Knowledge>();
  check_stream(stream);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  known->clock = s.clocks[number_of(s, stream)];
  known->is_followed = true;
  known->before = of_stream;
  of_stream = std::move(known);
}

void host_function_ends(c10::Stream stream) {
  const auto known = std::exchange(of_stream, of_stream->before);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.clocks[number_of(s, stream)].join(known->clock);
}

void check() {
  if (!state().has_debts) {
    return;
  }
  auto& s = state();
  std::string problem;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.has_debts = false;
    for (StreamNumber home = 0; home < s.debts.size(); ++home) {
      if (const auto* debt = races::pending(s, home, here().clock); debt && problem.empty()) {
        problem = races::freed_too_early(s, *debt, home);
      }
      s.debts[home].clear();
    }
  }
  TORCH_CHECK(problem.empty(), problem);
}

std::shared_ptr<Knowledge> knowledge() {
  return here().shared_from_this();
}

std::shared_ptr<Knowledge> snapshot() {
  auto copy = std::make_shared<Knowledge>();
  tell(*copy);
  return copy;
}

void learn(const Knowledge& from) {
  const bool in_backward = is_in_backward();
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  here().clock.join(from.clock);
  s.recorder.learn(here().issued, from.issued, in_backward);
}

void tell(Knowledge& to) {
  const bool in_backward = is_in_backward();
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  to.clock.join(here().clock);
  s.recorder.tell(to.issued, here().issued, in_backward);
}

void enter_thread(const Knowledge* parent) {
  here().is_followed = true;
  if (parent) {
    learn(*parent);
  }
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.recorder.thread_begins();
}

} // namespace simulated::clocks
