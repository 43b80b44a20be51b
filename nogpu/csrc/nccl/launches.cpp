// How a launch ends, and waiting for it. See later.h.
#include <chrono>
#include <utility>

#include "later.h"

namespace nccl {
namespace {

// How much longer than the meeting itself somebody waits for its answer.
constexpr double kGrace = 10;

} // namespace

Before::Before(standin::StreamName stream) {
  state.stream = stream;
  if (auto* watcher = clocks()) {
    watcher->recorded(state, stream);
  }
}

Before::~Before() {
  if (auto* watcher = clocks()) {
    watcher->forget(state);
  }
}

void finish(Launch& launch, Launch::State state, const std::string& text) {
  if (launch.state == Launch::kDone || (launch.state == Launch::kFailed && state == Launch::kFailed)) {
    return;
  }
  launch.state = state;
  launch.text = text;
  for (const auto& each : std::exchange(launch.holds, {})) {
    --each->held_by;
    if (each->state != Launch::kOpen) {
      continue;
    }
    if (state == Launch::kFailed) {
      each->refuse(text);
    } else if (each->held_by == 0) {
      each->give();
    }
  }
  launch.give = nullptr;
  launch.refuse = nullptr;
  changed().notify_all();
}

std::string wait_for(const Launches& launches) {
  if (launches.empty()) {
    return "";
  }
  std::string text;
  Lock lock(library_lock());
  for (const auto& each : launches) {
    while (each->state == Launch::kOpen) {
      expire();
      settle(lock);
      if (each->state != Launch::kOpen) {
        break;
      }
      changed().wait_for(lock, std::chrono::milliseconds(100));
      if (each->state == Launch::kOpen && now() > each->deadline + kGrace) {
        finish(*each, Launch::kFailed, "the process that made the communicator's id does not answer");
      }
    }
    if (each->state == Launch::kFailed && text.empty()) {
      text = each->text;
    }
  }
  return text;
}

} // namespace nccl
