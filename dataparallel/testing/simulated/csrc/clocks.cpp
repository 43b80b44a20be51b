#include "clocks.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <sstream>
#include <utility>

#include "limits.h"

namespace simulated {

namespace clocks {
namespace {

struct State {
  std::mutex mutex; // guards everything below, every Tracked and every Knowledge; nothing is called with it held
  std::vector<Clock> streams;
  std::vector<c10::Stream> names;
  std::vector<std::vector<Debt>> debts; // by the stream that the memory went back to; one per other stream: the last
  std::array<std::array<int32_t, kStreams>, kCeiling> numbers;

  State() {
    for (auto& device : numbers) {
      device.fill(-1);
    }
  }
};

State& state();

// A forked child has the mutex as it was: of all threads only the one that forks may hold it then.
void keep_whole_over_fork() {
  pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, [] { state().mutex.unlock(); });
}

// Never destroyed: memory is freed by engine threads until the very end.
State& state() {
  static State* the = [] {
    keep_whole_over_fork();
    return new State();
  }();
  return *the;
}

std::atomic<bool> is_enabled{true};
std::atomic<bool> stacks{false};
std::atomic<bool> has_debts{false};
std::atomic<std::string (*)()> stack_reader{nullptr};
thread_local std::shared_ptr<Knowledge> own_knowledge;
const auto kKind = c10::DebugInfoKind::TEST_INFO_2;

Knowledge& here() {
  if (auto* shared = dynamic_cast<Knowledge*>(c10::ThreadLocalDebugInfo::get(kKind))) {
    return *shared;
  }
  // Under torch's own entries; on top of one it would be in the way when that is taken off.
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

// Before the mutex is taken: a message is long in the making.
void check_stream(c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == c10::kPrivateUse1 && stream.id() >= 0 &&
                  stream.id() < static_cast<c10::StreamId>(kStreams),
              "expected a stream of a simulated device; got stream ", stream.id(), " of ", stream.device().str());
}

StreamNumber number_of(State& s, c10::Stream stream) {
  auto& number = s.numbers.at(static_cast<size_t>(stream.device_index())).at(static_cast<size_t>(stream.id()));
  if (number < 0) {
    number = static_cast<int32_t>(s.streams.size());
    s.streams.emplace_back();
    s.debts.emplace_back();
    s.names.push_back(stream);
  }
  return static_cast<StreamNumber>(number);
}

std::string name_of(const State& s, StreamNumber number) {
  const auto& stream = s.names[number];
  std::ostringstream out;
  if (stream.id() == 0) {
    out << "the default stream of " << stream.device().str();
  } else {
    out << "stream " << stream.id() << " of " << stream.device().str();
  }
  return out.str();
}

bool ordered(const Clock& clock, const Access& earlier) {
  return clock[earlier.stream] >= earlier.tick || (earlier.launch && earlier.launch->failed);
}

std::string describe(const State& s, const Access& earlier, bool write, Span span) {
  std::ostringstream out;
  if (!earlier.launch) {
    out << "the allocation of that memory on " << name_of(s, earlier.stream);
  } else {
    out << earlier.launch->op << ", which " << (write ? "writes" : "reads") << " bytes " << span.begin << " to "
        << span.end << " of it on " << name_of(s, earlier.stream);
  }
  return out.str();
}

std::string stack_of(const Access& earlier) {
  if (!earlier.launch) {
    return "";
  }
  if (earlier.launch->stack.empty()) {
    return stacks ? "\nThe earlier access was launched where no Python runs."
                  : "\ntorch.sim.clocks(stacks=True) shows where that was launched.";
  }
  return "\nThe earlier access was launched here:\n" + earlier.launch->stack;
}

constexpr const char* kRemedy =
    ". Let the first stream wait for the second (stream.wait_stream, stream.wait_event) or synchronize before.";

std::string race(const State& s, const std::string& op, const Touch& touch, StreamNumber stream,
                 const Access& earlier, bool earlier_write, Span span) {
  std::ostringstream out;
  out << "race: " << op << " " << (touch.write ? "writes" : "reads") << " its argument '" << touch.argument << "' in "
      << touch.block->where << " on " << name_of(s, stream) << ", and nothing orders it after "
      << describe(s, earlier, earlier_write, span) << kRemedy << stack_of(earlier);
  return out.str();
}

std::string freed_too_early(const State& s, const Debt& debt, StreamNumber home) {
  std::ostringstream out;
  out << "freed too early: memory in " << debt.where << " went back to " << name_of(s, home)
      << ", which may use it again, and nothing orders that after " << describe(s, debt.access, debt.write, debt.span)
      << ". Call tensor.record_stream(stream) before the last reference goes, or let the first stream wait for the "
      << "second." << stack_of(debt.access);
  return out.str();
}

// Forgets what is over, and returns the first debt that is not, if any.
const Debt* pending(State& s, StreamNumber home) {
  auto& debts = s.debts[home];
  const auto& known = here().clock;
  const auto& clock = s.streams[home];
  debts.erase(std::remove_if(debts.begin(), debts.end(),
                             [&](const Debt& debt) { return ordered(clock, debt.access) || ordered(known, debt.access); }),
              debts.end());
  return debts.empty() ? nullptr : &debts.front();
}

void owe(State& s, StreamNumber home, Debt debt) {
  has_debts = true;
  for (auto& other : s.debts[home]) {
    if (other.access.stream == debt.access.stream) {
      if (other.access.tick < debt.access.tick) {
        other = std::move(debt);
      }
      return;
    }
  }
  s.debts[home].push_back(std::move(debt));
}

void note_read(History::Segment& segment, const Access& access) {
  for (auto& read : segment.reads) {
    if (read.stream == access.stream) {
      read = access;
      return;
    }
  }
  segment.reads.push_back(access);
}

// Whether an earlier access and a new one to the same span have bytes in common.
bool meet(const Access& earlier, const Access& access, Span span) {
  if (!earlier.runs && !access.runs) {
    return true;
  }
  auto spans_of = [&](const Access& one) { return one.runs ? one.runs->spans() : std::vector<Span>{span}; };
  auto ours = spans_of(access), theirs = spans_of(earlier);
  auto by_begin = [](Span a, Span b) { return a.begin < b.begin; };
  std::sort(ours.begin(), ours.end(), by_begin);
  std::sort(theirs.begin(), theirs.end(), by_begin);
  for (size_t i = 0, j = 0; i < ours.size() && j < theirs.size();) {
    if (ours[i].begin < theirs[j].end && theirs[j].begin < ours[i].end) {
      return true;
    }
    ours[i].end < theirs[j].end ? ++i : ++j;
  }
  return false;
}

// The message of a race, or nothing; notes the access.
std::string touch_span(State& s, const Clock& clock, const std::string& op, const Touch& touch, Span span,
                       const Access& access) {
  auto& history = touch.block->history;
  const auto [first, last] = history.within(span);
  for (auto found = first; found != last; ++found) {
    auto& [begin, segment] = *found;
    const Span where{begin, segment.end};
    auto races = [&](const Access& earlier) { return !ordered(clock, earlier) && meet(earlier, access, where); };
    if (races(segment.write)) {
      return race(s, op, touch, access.stream, segment.write, true, where);
    }
    if (!touch.write) {
      note_read(segment, access);
      continue;
    }
    for (const auto& read : segment.reads) {
      if (races(read)) {
        return race(s, op, touch, access.stream, read, false, where);
      }
    }
  }
  if (touch.write) {
    history.write(span, access);
  }
  return "";
}

// The message if what others did to the memory before it was given out again may not be over; said once.
std::string use_again(State& s, const Clock& clock, Tracked& block) {
  for (const auto& debt : std::exchange(block.inherited, {})) {
    if (!ordered(clock, debt.access)) {
      s.debts[*block.home].clear();
      return freed_too_early(s, debt, *block.home);
    }
  }
  return "";
}

// The message for the first of the touches that is not ordered; notes the others.
std::string touch_all(State& s, const Clock& clock, const std::string& op, c10::ArrayRef<Touch> touches,
                      const Access& access) {
  for (const auto& touch : touches) {
    auto problem = touch.write ? use_again(s, clock, *touch.block) : "";
    auto of_touch = access;
    of_touch.runs = touch.runs;
    for (auto span = touch.spans.begin(); span != touch.spans.end() && problem.empty(); ++span) {
      problem = touch_span(s, clock, op, touch, *span, of_touch);
    }
    if (!problem.empty()) {
      return problem;
    }
  }
  return "";
}

} // namespace

bool enabled() {
  return is_enabled.load(std::memory_order_relaxed);
}

void enable(bool on) {
  is_enabled = on;
}

void keep_stacks(bool on) {
  stacks = on;
}

bool stacks_kept() {
  return stacks;
}

void set_stack_reader(std::string (*reader)()) {
  stack_reader = reader;
}

Ticket launch(c10::Stream stream, const std::string& op, c10::ArrayRef<Touch> touches,
              std::optional<c10::Stream> joined) {
  if (!enabled() && !joined) {
    return {};
  }
  auto record = std::make_shared<Launch>();
  record->op = op;
  if (enabled() && stacks && stack_reader) {
    record->stack = (*stack_reader)(); // takes the GIL, so not with the mutex held
  }
  auto& s = state();
  std::string problem;
  Ticket ticket;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    const auto number = number_of(s, stream);
    const auto other = joined ? number_of(s, *joined) : number;
    auto& clock = s.streams[number];
    clock.join(here().clock);
    clock.join(s.streams[other]);
    if (enabled()) {
      ticket.access = {number, clock.tick(number), std::move(record), nullptr};
      problem = touch_all(s, clock, op, touches, ticket.access);
    }
    // Also while the clocks are off: as with events, the order is needed when they are on again.
    s.streams[other].join(clock);
  }
  if (!problem.empty()) {
    ticket.failed();
    TORCH_CHECK(false, problem);
  }
  return ticket;
}

void wrote(const Ticket& ticket, Tracked& block, size_t bytes) {
  if (!ticket) {
    return;
  }
  auto& s = state();
  std::string problem;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    const auto home = ticket.access.stream;
    block.home = home;
    block.history.start_with(bytes, ticket.access);
    if (has_debts) {
      if (const auto* debt = pending(s, home)) {
        problem = freed_too_early(s, *debt, home);
        s.debts[home].clear();
      }
    }
  }
  TORCH_CHECK(problem.empty(), problem);
}

void allocated(Tracked& block, size_t bytes, c10::Stream home) {
  if (!enabled()) {
    return;
  }
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto number = number_of(s, home);
  block.home = number;
  // The memory may have been used by what the stream has launched so far, so only what comes after it may write there.
  block.history.start_with(bytes, {number, s.streams[number][number], nullptr, nullptr});
  if (has_debts && pending(s, number)) {
    block.inherited = s.debts[number];
  }
}

void freed(Tracked& block) {
  if (!enabled() || !block.home) {
    return;
  }
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto& known = here().clock;
  const auto& home = s.streams[*block.home];
  for (const auto& [begin, segment] : block.history.segments()) {
    const Span span{begin, segment.end};
    auto settle = [&](const Access& access, bool write) {
      const bool is_recorded =
          std::find(block.recorded.begin(), block.recorded.end(), access.stream) != block.recorded.end();
      if (!is_recorded && !ordered(home, access) && !ordered(known, access)) {
        owe(s, *block.home, {access, write, span, block.where});
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
  auto& clock = s.streams[number_of(s, stream)];
  clock.join(here().clock);
  event.clock = clock;
  event.recorded = true;
  event.nanoseconds = std::chrono::steady_clock::now().time_since_epoch().count();
}

void wait(c10::Stream stream, const Event& event) {
  check_stream(stream);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto number = number_of(s, stream); // may move the clocks
  s.streams[number].join(event.clock);
}

void host_waits(const Event& event) {
  std::lock_guard<std::mutex> lock(state().mutex);
  here().clock.join(event.clock);
}

void host_waits(c10::Stream stream) {
  check_stream(stream);
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  here().clock.join(s.streams[number_of(s, stream)]);
}

void host_waits_for_device(c10::DeviceIndex device) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (size_t i = 0; i < s.names.size(); ++i) {
    if (s.names[i].device_index() == device) {
      here().clock.join(s.streams[i]);
    }
  }
}

void check() {
  if (!has_debts) {
    return;
  }
  auto& s = state();
  std::string problem;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    has_debts = false;
    for (StreamNumber home = 0; home < s.debts.size(); ++home) {
      if (const auto* debt = pending(s, home); debt && problem.empty()) {
        problem = freed_too_early(s, *debt, home);
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
  std::lock_guard<std::mutex> lock(state().mutex);
  here().clock.join(from.clock);
}

void tell(Knowledge& to) {
  std::lock_guard<std::mutex> lock(state().mutex);
  to.clock.join(here().clock);
}

void enter_thread(const Knowledge* parent) {
  here();
  if (parent) {
    learn(*parent);
  }
}

} // namespace clocks
} // namespace simulated
