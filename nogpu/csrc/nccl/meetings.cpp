// The meetings of this process, what is ready to be computed in them, and the desks of meetings elsewhere. See meeting.h.
#include <algorithm>

#include "declarations.h"
#include "meeting.h"

namespace nccl {
namespace {

std::map<std::string, std::shared_ptr<Meeting>>& all_meetings() {
  static auto* all = new std::map<std::string, std::shared_ptr<Meeting>>;
  return *all;
}

std::map<std::string, std::weak_ptr<Desk>>& all_desks() {
  static auto* all = new std::map<std::string, std::weak_ptr<Desk>>;
  return *all;
}

std::deque<std::shared_ptr<Collective>>& ready() {
  static auto* all = new std::deque<std::shared_ptr<Collective>>;
  return *all;
}

} // namespace

void make_ready(const std::shared_ptr<Collective>& collective) {
  ready().push_back(collective);
}

std::shared_ptr<Meeting> meeting_of(const std::string& key, int ranks) {
  auto& meeting = all_meetings()[key];
  if (!meeting) {
    meeting = std::make_shared<Meeting>(key, ranks);
    add_desk(key, meeting);
  }
  return meeting;
}

std::vector<std::shared_ptr<Meeting>> meetings() {
  std::vector<std::shared_ptr<Meeting>> result;
  for (const auto& each : all_meetings()) {
    result.push_back(each.second);
  }
  return result;
}

void drop_meeting(const std::string& key) {
  all_meetings().erase(key);
  all_desks().erase(key);
}

void add_desk(const std::string& key, std::weak_ptr<Desk> desk) {
  all_desks()[key] = std::move(desk);
}

void fail_circle(const Circle& circle) {
  for (const auto& key : circle.meetings) {
    const auto found = all_desks().find(key);
    if (found == all_desks().end()) {
      continue;
    }
    if (const auto desk = found->second.lock()) {
      desk->fail(ncclInvalidUsage, circle.text);
    }
  }
}

void expire() {
  for (const auto& meeting : meetings()) {
    meeting->expire(now());
  }
}

void settle(Lock& lock) {
  while (!ready().empty()) {
    const auto collective = ready().front();
    ready().pop_front();
    const auto& arrivals = collective->arrivals;
    const auto cancelled = std::count_if(arrivals.begin(), arrivals.end(),
                                         [](const Arrival& arrival) { return !arrival.cancelled.empty(); });
    if (cancelled == 0) {
      lock.unlock();
      compute(*collective);
      lock.lock();
    } else if (static_cast<size_t>(cancelled) < arrivals.size()) {
      const auto which = std::find_if(arrivals.begin(), arrivals.end(),
                                      [](const Arrival& arrival) { return !arrival.cancelled.empty(); });
      collective->meeting->fail(ncclRemoteError, "a rank could not launch its call: " + which->cancelled);
    }
    collective->meeting->finish(collective);
  }
}

} // namespace nccl
