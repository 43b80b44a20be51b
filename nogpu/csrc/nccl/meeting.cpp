#include "meeting.h"

#include <algorithm>

#include "declarations.h"

namespace nccl {
const Arrival* Collective::first() const {
  const auto found =
      std::find_if(arrivals.begin(), arrivals.end(), [](const Arrival& arrival) { return arrival.has_come; });
  return found == arrivals.end() ? nullptr : &*found;
}

Meeting::Meeting(std::string key, int ranks) : key_(std::move(key)), members_(static_cast<size_t>(ranks)) {
  since_ = now();
}

void Meeting::join(int rank, int ranks, const Identity& identity, std::shared_ptr<Answers> answers) {
  if (!failure_.empty()) {
    answers->failed(ncclInvalidUsage, failure_);
    return;
  }
  const auto error = why_not(identity, rank, ranks);
  if (!error.empty()) {
    answers->failed(ncclInvalidUsage, error);
    fail(ncclInvalidUsage, error);
    return;
  }
  auto& member = members_[static_cast<size_t>(rank)];
  member.identity = identity;
  member.answers = std::move(answers);
  if (++joined_ == members_.size()) {
    for (const auto& each : members_) {
      each.answers->joined();
    }
  }
}

void Meeting::post(int rank, uint64_t number, const Call& call, std::shared_ptr<Before> before) {
  auto& member = members_[static_cast<size_t>(rank)];
  if (!failure_.empty() || !member.left.empty()) {
    return;
  }
  const auto collective = find(rank, call);
  const auto error = why_not(*collective, rank, call);
  if (!error.empty()) {
    fail(ncclInvalidUsage, error);
    return;
  }
  const size_t place = call.kind == Kind::kReceive ? 1 : call.kind == Kind::kSend ? 0 : static_cast<size_t>(rank);
  auto& arrival = collective->arrivals[place];
  arrival.has_come = true;
  arrival.number = number;
  arrival.call = call;
  arrival.before = std::move(before);
  member.open[number] = {collective, place};
  member.last = describe(call);
  if (++collective->come == collective->arrivals.size()) {
    match(*collective);
  }
}

void Meeting::give(int rank, uint64_t number, double factor, const char* data, size_t, char* to) {
  auto& open = members_[static_cast<size_t>(rank)].open;
  const auto found = open.find(number);
  if (!failure_.empty() || found == open.end()) {
    return;
  }
  const auto& collective = found->second.first;
  auto& arrival = collective->arrivals[found->second.second];
  arrival.has_given = true;
  arrival.factor = factor;
  arrival.data = data;
  arrival.to = to;
  if (++collective->given == collective->arrivals.size()) {
    make_ready(collective);
  }
}

void Meeting::give_owned(int rank, uint64_t number, double factor, std::string data) {
  auto& open = members_[static_cast<size_t>(rank)].open;
  const auto found = open.find(number);
  if (!failure_.empty() || found == open.end()) {
    return;
  }
  auto& arrival = found->second.first->arrivals[found->second.second];
  arrival.owned = std::move(data);
  give(rank, number, factor, arrival.owned.data(), arrival.owned.size(), nullptr);
}

void Meeting::cancel(int rank, uint64_t number, const std::string& why) {
  auto& open = members_[static_cast<size_t>(rank)].open;
  const auto found = open.find(number);
  if (!failure_.empty() || found == open.end()) {
    return;
  }
  found->second.first->arrivals[found->second.second].cancelled = why;
  give(rank, number, 1, nullptr, 0, nullptr);
}

void Meeting::leave(int rank, const std::string& how) {
  if (rank < 0 || rank >= ranks() || !members_[static_cast<size_t>(rank)].left.empty()) {
    return;
  }
  auto& member = members_[static_cast<size_t>(rank)];
  member.left = how;
  std::string waiting;
  const auto look = [&](const Collective& collective) {
    for (size_t i = 0; i < collective.ranks.size(); ++i) {
      // What it has given is in its own memory, unless it came by a message.
      const bool has_gone = !collective.arrivals[i].has_given || collective.arrivals[i].owned.empty();
      if (waiting.empty() && collective.ranks[i] == rank && collective.come && has_gone) {
        waiting = missing(collective);
      }
    }
  };
  for (const auto& each : open_) {
    look(*each);
  }
  for (const auto& line : lines_) {
    for (const auto& each : line.second.open) {
      look(*each);
    }
  }
  if (joined_ < members_.size() && member.answers) {
    waiting = missing_to_join();
  }
  if (is_over()) {
    forget_orders(key_);
    drop_meeting(key_);
  } else if (!waiting.empty()) {
    fail(ncclRemoteError, name(rank) + " " + how + ", and " + waiting);
  }
}

void Meeting::fail(int code, const std::string& text) {
  if (!failure_.empty()) {
    return;
  }
  failure_ = text;
  open_.clear();
  lines_.clear();
  for (auto& member : members_) {
    member.open.clear();
    if (member.answers && member.left.empty()) {
      member.answers->failed(code, text);
    }
  }
  forget_orders(key_);
}

// The next collective of the rank, or of the pair of ranks; made if this is the first one to come.
std::shared_ptr<Collective> Meeting::find(int rank, const Call& call) {
  if (!is_point_to_point(call.kind)) {
    const auto next = members_[static_cast<size_t>(rank)].next++;
    while (first_ + open_.size() <= next) {
      std::vector<int> everybody(members_.size());
      for (size_t i = 0; i < everybody.size(); ++i) {
        everybody[i] = static_cast<int>(i);
      }
      open_.push_back(made(std::move(everybody)));
    }
    return open_[next - first_];
  }
  const bool receives = call.kind == Kind::kReceive;
  const std::pair<int, int> ends = receives ? std::pair{call.peer, rank} : std::pair{rank, call.peer};
  auto& line = lines_[ends];
  const auto next = line.next[receives]++;
  while (line.first + line.open.size() <= next) {
    line.open.push_back(made({ends.first, ends.second}));
  }
  return line.open[next - line.first];
}

std::shared_ptr<Collective> Meeting::made(std::vector<int> ranks) {
  auto result = std::make_shared<Collective>();
  result->number = made_++;
  result->meeting = shared_from_this();
  result->arrivals.resize(ranks.size());
  result->ranks = std::move(ranks);
  result->since = now();
  return result;
}

// Everybody has launched: what that means for the order of launches.
void Meeting::match(Collective& collective) {
  const auto& call = collective.first()->call;
  Matched matched;
  matched.meeting = key_;
  matched.number = collective.number;
  matched.text = describe(call) + " by ranks " + std::to_string(collective.ranks.front());
  for (size_t i = 1; i < collective.ranks.size(); ++i) {
    matched.text += (i + 1 == collective.ranks.size() ? " and " : ", ") + std::to_string(collective.ranks[i]);
  }
  matched.text += " of " + title();
  if (call.kind != Kind::kSplit) {
    for (size_t i = 0; i < collective.ranks.size(); ++i) {
      const auto device = members_[static_cast<size_t>(collective.ranks[i])].identity.device;
      matched.launches.emplace_back(device, collective.arrivals[i].call.issued);
    }
  }
  const auto circle = launched(matched);
  for (size_t i = 0; i < collective.arrivals.size(); ++i) {
    Befores befores;
    for (size_t j = 0; j < collective.arrivals.size(); ++j) {
      const auto& arrival = collective.arrivals[j];
      if (j != i && arrival.before && depends(collective.arrivals[i].call, collective.ranks[i], collective.ranks[j])) {
        befores.push_back(arrival.before);
      }
    }
    const auto& member = members_[static_cast<size_t>(collective.ranks[i])];
    member.answers->matched(collective.arrivals[i].number, matched, befores);
  }
  if (!circle.text.empty()) {
    fail_circle(circle);
  }
}

void Meeting::finish(const std::shared_ptr<Collective>& collective) {
  if (!failure_.empty()) {
    return;
  }
  completed(key_, collective->number);
  for (size_t i = 0; i < collective->ranks.size(); ++i) {
    members_[static_cast<size_t>(collective->ranks[i])].open.erase(collective->arrivals[i].number);
  }
  const auto is_done = [](const std::shared_ptr<Collective>& each) { return each->given == each->arrivals.size(); };
  while (!open_.empty() && is_done(open_.front())) {
    open_.pop_front();
    ++first_;
  }
  if (is_point_to_point(collective->arrivals.front().call.kind)) {
    auto& line = lines_[{collective->ranks[0], collective->ranks[1]}];
    while (!line.open.empty() && is_done(line.open.front())) {
      line.open.pop_front();
      ++line.first;
    }
  }
  // Ranks of this process are told last: their process may end as soon as they know, and take the values along.
  collective->untold = 1;
  tell(collective, true);
  if (--collective->untold == 0) {
    tell(collective, false);
  }
}

void Meeting::tell(const std::shared_ptr<Collective>& collective, bool remote) {
  for (size_t i = 0; i < collective->ranks.size(); ++i) {
    const auto answers = members_[static_cast<size_t>(collective->ranks[i])].answers;
    if (answers->is_remote() != remote) {
      continue;
    }
    collective->untold += remote;
    auto& arrival = collective->arrivals[i];
    answers->done(arrival.number, std::move(arrival.result), [collective, remote] {
      if (remote && --collective->untold == 0) {
        collective->meeting->tell(collective, false);
      }
    });
  }
}

void Meeting::expire(double time) {
  if (!failure_.empty()) {
    return;
  }
  std::string late;
  const auto look = [&](const Collective& collective) {
    if (late.empty() && collective.come && time - collective.since > patience()) {
      late = missing(collective);
    }
  };
  for (const auto& each : open_) {
    look(*each);
  }
  for (const auto& line : lines_) {
    for (const auto& each : line.second.open) {
      look(*each);
    }
  }
  if (joined_ < members_.size() && time - since_ > patience()) {
    late = missing_to_join();
  }
  if (!late.empty()) {
    fail(ncclRemoteError, "after " + std::to_string(static_cast<int>(patience())) + " seconds " + late);
  }
}

bool Meeting::is_over() const {
  return std::all_of(members_.begin(), members_.end(), [](const Member& each) { return !each.left.empty(); });
}

void Meeting::leave_all_here() {
  for (int rank = 0; rank < ranks(); ++rank) {
    const auto answers = members_[static_cast<size_t>(rank)].answers;
    if (answers && !answers->is_remote()) {
      leave(rank, "has ended");
    }
  }
}

size_t Meeting::remote_ranks() const {
  return static_cast<size_t>(std::count_if(members_.begin(), members_.end(), [](const Member& each) {
    return each.answers && each.answers->is_remote() && each.left.empty();
  }));
}

} // namespace nccl
