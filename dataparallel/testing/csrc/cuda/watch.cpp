#include "watch.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>

#include "counts.h"

namespace simulated {
namespace {

std::atomic<bool> answers_late{false};
thread_local Clock asked;

// The launch of an operator on its way through the runtime.
struct OnTheWay {
  c10::ArrayRef<Touch> touches;
  clocks::Ticket ticket;
};
thread_local OnTheWay* on_the_way = nullptr;

const char* label_of(int device) {
  static const auto* labels = [] {
    auto* made = new std::vector<std::string>();
    for (int i = 0; i < 64; ++i) {
      made->push_back("cuda:" + std::to_string(i));
    }
    return made;
  }();
  return device < 0 ? "pinned host memory" : labels->at(static_cast<size_t>(device)).c_str();
}

Event& event_in(const standin::EventState& state) {
  return *static_cast<Event*>(state.watched);
}

Tracked* tracked(const standin::Memory& memory) {
  return static_cast<Tracked*>(memory.watched);
}

class ClockWatcher final : public standin::Watcher {
 public:
  std::string launch(standin::StreamName stream, const char* name, const standin::Part* parts, size_t count,
                     const standin::CopyInfo* copy) override {
    Work work;
    c10::SmallVector<Touch, 4> touches;
    if (on_the_way) {
      touches.append(on_the_way->touches.begin(), on_the_way->touches.end());
    }
    for (size_t i = 0; i < count; ++i) {
      if (parts[i].memory && tracked(*parts[i].memory)) {
        touches.push_back({tracked(*parts[i].memory), {{parts[i].begin, parts[i].end}}, parts[i].writes,
                           parts[i].argument, nullptr});
      }
    }
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
    work.moved(name, copy ? copy->bytes : 0, copy ? copy->from : stream.device, copy ? copy->to : stream.device);
    clocks::done(ticket, std::move(work));
    return "";
  }

  void recorded(standin::EventState& event, standin::StreamName stream) override {
    if (!event.watched) {
      event.watched = new Event();
    }
    clocks::record(event_in(event), stream_of(stream));
  }
  void stream_waits(standin::StreamName stream, const standin::EventState& event) override {
    if (event.watched) {
      clocks::wait(stream_of(stream), event_in(event));
    }
  }
  void stream_waits_for_stream(standin::StreamName later, standin::StreamName earlier) override {
    clocks::wait(stream_of(later), stream_of(earlier));
  }
  void host_waited(const standin::EventState& event, const char*) override {
    if (event.watched) {
      clocks::host_waits(event_in(event));
    }
  }
  void host_waited_for_stream(standin::StreamName stream, const char*) override {
    clocks::host_waits(stream_of(stream));
  }
  void host_waited_for_device(int device, const char*) override {
    clocks::host_waits_for_device(static_cast<c10::DeviceIndex>(device));
  }
  bool host_asks(const standin::EventState& event) override {
    if (!event.watched || clocks::host_knows(event_in(event))) {
      return true;
    }
    if (answers_late) {
      return false;
    }
    asked.join(event_in(event).clock);
    clocks::allocator_asks(event_in(event));
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

  void forget(standin::EventState& event) override {
    delete static_cast<Event*>(event.watched);
    event.watched = nullptr;
  }
  void allocated(standin::Memory& memory) override {
    auto* made = new Tracked();
    made->where = label_of(memory.device);
    made->is_handed_on = memory.device < 0;
    memory.watched = made;
  }
  void freed(standin::Memory& memory) override {
    delete tracked(memory);
    memory.watched = nullptr;
  }
};

} // namespace

c10::Stream stream_of(standin::StreamName name) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(name.device)),
                     static_cast<c10::StreamId>(name.number));
}

clocks::Ticket launch_on(standin::StreamName stream, const std::string& op, c10::ArrayRef<Touch> touches) {
  OnTheWay way{touches, {}};
  auto* const before = std::exchange(on_the_way, &way);
  std::string problem;
  try {
    problem = standin::announce(stream, op.c_str(), nullptr, 0);
  } catch (...) {
    on_the_way = before;
    throw;
  }
  on_the_way = before;
  TORCH_CHECK(problem.empty(), problem);
  return way.ticket;
}

const Clock& asked_here() {
  return asked;
}

void answer_queries_late(bool late) {
  answers_late = late;
}

void watch_runtime() {
  static auto* the = new ClockWatcher();
  standin::watch(the);
}

} // namespace simulated
