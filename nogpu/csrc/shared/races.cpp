#include "races.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "keys.h"

namespace simulated::races {
namespace {

std::string name_of(const Streams& s, StreamNumber number) {
  const auto& stream = s.names[number];
  std::ostringstream out;
  if (stream.id() == 0) {
    out << "the default stream of " << stream.device().str();
  } else {
    out << "stream " << stream.id() << " of " << stream.device().str();
  }
  return out.str();
}

std::string describe(const Streams& s, const Access& earlier, bool write, Span span) {
  std::ostringstream out;
  if (!earlier.launch) {
    out << "the allocation of that memory on " << name_of(s, earlier.stream);
  } else {
    out << earlier.launch->op << ", which " << (write ? "writes" : "reads") << " bytes " << span.begin << " to "
        << span.end << " of it on " << name_of(s, earlier.stream);
  }
  return out.str();
}

std::string stack_of(const Streams& s, const Access& earlier) {
  if (!earlier.launch) {
    return "";
  }
  if (earlier.launch->stack.empty()) {
    return s.keeps_stacks ? "\nThe earlier access was launched where no Python runs."
                          : "\n" + std::string(kWithStacks) + " shows where that was launched.";
  }
  return "\nThe earlier access was launched here:\n" + earlier.launch->stack;
}

constexpr const char* kKeep =
    ". Call tensor.record_stream(stream) before the last reference goes, or let the first stream wait for the second.";
constexpr const char* kRemedy =
    ". Let the first stream wait for the second (stream.wait_stream, stream.wait_event) or synchronize before.";

std::string race(const Streams& s, const std::string& op, const Touch& touch, StreamNumber stream,
                 const Access& earlier, bool earlier_write, Span span) {
  std::ostringstream out;
  if (earlier.is_before_free) {
    out << "freed too early: " << op << " on " << name_of(s, stream) << " uses memory in " << touch.block->where
        << " again, and nothing orders that after " << describe(s, earlier, earlier_write, span) << kKeep
        << stack_of(s, earlier);
    return out.str();
  }
  out << "race: " << op << " " << (touch.write ? "writes" : "reads") << " its argument '" << touch.argument << "' in "
      << touch.block->where << " on " << name_of(s, stream) << ", and nothing orders it after "
      << describe(s, earlier, earlier_write, span) << kRemedy << stack_of(s, earlier);
  return out.str();
}

// True if an earlier and a new access within the same span have bytes in common.
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

// Records the access. Returns the message of a race, or nothing.
std::string touch_span(Streams& s, const Clock& clock, const std::string& op, const Touch& touch, Span span,
                       const Access& access) {
  auto& history = touch.block->history;
  const auto [first, last] = history.within(span);
  for (auto found = first; found != last; ++found) {
    auto& [begin, segment] = *found;
    const Span where{begin, segment.end};
    auto races = [&](const Access& earlier) {
      return !ordered(clock, earlier) && meet(earlier, access, where);
    };
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

// Returns the message if another stream used the memory before it was allocated again and may still do so, or nothing.
// Reports this once.
std::string use_again(Streams& s, const Clock& clock, Tracked& block) {
  for (const auto& debt : std::exchange(block.inherited, {})) {
    if (debt.is_contested || !ordered(clock, debt.access)) {
      s.debts[*block.home].clear();
      return freed_too_early(s, debt, *block.home);
    }
  }
  return "";
}

} // namespace

void keep_latest(PeerAccesses& accesses, const PeerAccess& latest) {
  for (auto& one : accesses) {
    if (one.access.stream == latest.access.stream && one.where == latest.where) {
      one = latest;
      return;
    }
  }
  accesses.push_back(latest);
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

bool ordered(const Clock& clock, const Access& earlier) {
  return clock[earlier.stream] >= earlier.tick || (earlier.launch && earlier.launch->failed);
}

std::string freed_too_early(const Streams& s, const Debt& debt, StreamNumber home) {
  std::ostringstream out;
  out << "freed too early: memory in " << debt.where << " went back to " << name_of(s, home)
      << (debt.is_contested ? ", from which another thread of the same backward takes memory" : ", which may use it again")
      << ", and nothing orders that after " << describe(s, debt.access, debt.write, debt.span) << kKeep
      << stack_of(s, debt.access);
  return out.str();
}

const Debt* pending(Streams& s, StreamNumber home, const Clock& known) {
  auto& debts = s.debts[home];
  const auto& clock = s.clocks[home];
  debts.erase(std::remove_if(debts.begin(), debts.end(),
                             [&](const Debt& debt) {
                               return !debt.is_contested &&
                                   (ordered(clock, debt.access) || ordered(known, debt.access));
                             }),
              debts.end());
  return debts.empty() ? nullptr : &debts.front();
}

void took(Streams& s, StreamNumber home, uint64_t tick, const Worker& worker) {
  if (worker.backward < 0) {
    return;
  }
  auto& taken = s.taken[home];
  if (taken.backward != worker.backward) {
    taken = {worker.backward, {}};
  }
  taken.ticks[worker.thread] = tick;
}

bool is_contested(const Streams& s, StreamNumber home, uint64_t known, const Worker& worker) {
  const auto& taken = s.taken[home];
  return worker.backward >= 0 && taken.backward == worker.backward &&
      std::any_of(taken.ticks.begin(), taken.ticks.end(), [&](const auto& one) {
           const auto& [thread, tick] = one;
           return thread != worker.thread && tick > known;
         });
}

void owe(Streams& s, StreamNumber home, Debt debt) {
  s.has_debts = true;
  for (auto& other : s.debts[home]) {
    if (other.access.stream == debt.access.stream) {
      if (!other.is_contested && (debt.is_contested || other.access.tick < debt.access.tick)) {
        other = std::move(debt);
      }
      return;
    }
  }
  s.debts[home].push_back(std::move(debt));
}

std::string touch_all(Streams& s, const Clock& clock, const std::string& op, c10::ArrayRef<Touch> touches,
                      const Access& access) {
  for (const auto& touch : touches) {
    auto problem = touch.write ? use_again(s, clock, *touch.block) : "";
    auto of_touch = access;
    of_touch.runs = touch.runs;
    for (auto span = touch.spans.begin(); span != touch.spans.end() && problem.empty(); ++span) {
      problem = touch_span(s, clock, op, touch, *span, of_touch);
      if (touch.block->device >= 0 && s.names[access.stream].device_index() != touch.block->device) {
        keep_latest(touch.block->by_peers, {of_touch, touch.write, *span, touch.block->where});
      }
    }
    if (!problem.empty()) {
      return problem;
    }
  }
  return "";
}

std::string host_touches(Streams& s, const Clock& clock, const std::string& op, c10::ArrayRef<Touch> touches) {
  for (const auto& touch : touches) {
    for (const auto& span : touch.spans) {
      const auto [first, last] = touch.block->history.within(span);
      for (auto found = first; found != last; ++found) {
        const auto& segment = found->second;
        const Access* early = ordered(clock, segment.write) ? nullptr : &segment.write;
        const bool is_write = early != nullptr;
        for (const auto& read : segment.reads) {
          early = !early && touch.write && !ordered(clock, read) ? &read : early;
        }
        if (early) {
          std::ostringstream out;
          out << "race: " << op << " on the host " << (touch.write ? "writes" : "reads") << " its argument '"
              << touch.argument << "' in " << touch.block->where << ", and the host has not waited for "
              << describe(s, *early, is_write, {found->first, segment.end})
              << ". Call stream.synchronize() or event.synchronize() before." << stack_of(s, *early);
          return out.str();
        }
      }
    }
  }
  return "";
}

std::string gone(const Streams& s, const Clock& clock, const Tracked& block) {
  for (const auto& [begin, segment] : block.history.segments()) {
    const auto* early = ordered(clock, segment.write) ? nullptr : &segment.write;
    const bool is_write = early != nullptr;
    for (const auto& read : segment.reads) {
      early = early || !read.launch || ordered(clock, read) ? early : &read;
    }
    if (early && early->launch) {
      std::ostringstream out;
      out << "freed too early: memory in " << block.where << " ceases to exist, and the host has not waited for "
          << describe(s, *early, is_write, {begin, segment.end})
          << ". Call stream.synchronize() or event.synchronize() before." << stack_of(s, *early);
      return out.str();
    }
  }
  return "";
}

std::string gone_for_peers(const Streams& s, const Clock& clock, const PeerAccesses& accesses) {
  for (const auto& [access, write, span, where] : accesses) {
    if (!ordered(clock, access)) {
      std::ostringstream out;
      out << "freed too early: memory in " << where << " ceases to exist, and the host has not waited for "
          << describe(s, access, write, span)
          << ". Freeing waits for the memory's own device, and takes it from the others before that. Hold the memory "
             "until an event of that stream has passed (event.query() or event.synchronize()), or call "
             "tensor.record_stream with that stream." << stack_of(s, access);
      return out.str();
    }
  }
  return "";
}

} // namespace simulated::races
