#include "orders.h"

#include <algorithm>
#include <deque>
#include <set>

namespace nccl {
namespace {

// Collectives that are complete may have been launched after others that are not yet launched everywhere.
constexpr size_t kKept = 64;

struct Known {
  Matched collective;
  bool is_complete = false;
};

std::deque<Known>& known() {
  static auto* all = new std::deque<Known>;
  return *all;
}

// True if a device has launched `a` before `b`.
bool is_before(const Matched& a, const Matched& b) {
  for (const auto& [device, number] : a.launches) {
    for (const auto& [other, later] : b.launches) {
      if (device == other && number < later) {
        return true;
      }
    }
  }
  return false;
}

// Extends `path` by collectives that come one after the other until the first one comes again. Only its first step may
// go to one that is complete: what completed has had no circle.
bool closes(std::vector<size_t>& path, std::set<size_t>& seen) {
  const auto& all = known();
  const auto& last = all[path.back()];
  if (path.size() > 1 && is_before(last.collective, all[path.front()].collective)) {
    return true;
  }
  if (path.size() > 1 && last.is_complete) {
    return false;
  }
  for (size_t i = 0; i < all.size(); ++i) {
    if ((path.size() == 1 || !all[i].is_complete) && !seen.count(i) &&
        is_before(last.collective, all[i].collective)) {
      seen.insert(i);
      path.push_back(i);
      if (closes(path, seen)) {
        return true;
      }
      path.pop_back();
    }
  }
  return false;
}

Circle described(const std::vector<size_t>& path) {
  Circle circle;
  std::string& text = circle.text;
  text = "collectives wait for each other in a circle: ";
  for (const auto i : path) {
    const auto& each = known()[i].collective;
    text += (i == path.front() ? "" : ", which a device launches before ") + each.text;
    circle.meetings.push_back(each.meeting);
  }
  text += ", which another device launches before the first one. On GPUs each of them can wait for the kernel of the "
          "next for ever. Launch them in one order on all devices, or, for ncclSend and ncclRecv, in one group";
  return circle;
}

} // namespace

Circle launched(const Matched& collective) {
  auto& all = known();
  for (const auto& each : all) {
    if (each.collective.number == collective.number && each.collective.meeting == collective.meeting) {
      return {};
    }
  }
  all.push_back({collective});
  std::vector<size_t> path{all.size() - 1};
  std::set<size_t> seen{all.size() - 1};
  if (closes(path, seen)) {
    return described(path);
  }
  const auto finished = std::count_if(all.begin(), all.end(), [](const Known& each) { return each.is_complete; });
  if (static_cast<size_t>(finished) > kKept) {
    all.erase(std::find_if(all.begin(), all.end(), [](const Known& each) { return each.is_complete; }));
  }
  return {};
}

void completed(const std::string& meeting, uint64_t number) {
  for (auto& each : known()) {
    if (each.collective.number == number && each.collective.meeting == meeting) {
      each.is_complete = true;
    }
  }
}

void forget_orders(const std::string& meeting) {
  auto& all = known();
  all.erase(std::remove_if(all.begin(), all.end(),
                           [&](const Known& each) { return each.collective.meeting == meeting; }),
            all.end());
}

} // namespace nccl
