// Why ranks cannot meet, in sentences. See meeting.h.
#include <cstring>

#include "meeting.h"

namespace nccl {
namespace {

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == names.size() ? " and " : ", ") + names[i];
  }
  return text;
}

} // namespace

std::string Meeting::name(int rank) const {
  const auto& identity = members_[static_cast<size_t>(rank)].identity;
  return "rank " + std::to_string(rank) +
      (identity.process ? " (cuda:" + std::to_string(identity.index) + " of process " + std::to_string(identity.pid) + ")"
                        : "");
}

// The key is the name of a socket, which ends in the numbers of a process, and then what the communicator is there.
std::string Meeting::title() const {
  const auto rest = key_.find(' ');
  const auto number = key_.rfind('-', rest);
  const auto pid = key_.rfind('-', number - 1);
  return "communicator" + key_.substr(rest) + " of process " + key_.substr(pid + 1, number - pid - 1);
}

std::string Meeting::why_not(const Identity& identity, int rank, int ranks) const {
  if (static_cast<size_t>(ranks) != members_.size()) {
    return "rank " + std::to_string(rank) + " joins a communicator of " + std::to_string(ranks) +
        " ranks, and other ranks one of " + std::to_string(members_.size()) + ", with the same id";
  }
  if (members_[static_cast<size_t>(rank)].answers) {
    return "rank " + std::to_string(rank) + " joins a communicator twice: as " + name(rank) + " and from process " +
        std::to_string(identity.pid) + ". Give every rank a number of its own, and every communicator an id of its own";
  }
  for (int other = 0; other < ranks; ++other) {
    const auto& there = members_[static_cast<size_t>(other)];
    if (there.answers && std::strcmp(there.identity.host, identity.host) == 0 &&
        std::strcmp(there.identity.bus, identity.bus) == 0) {
      return "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(other) +
          " both on CUDA device " + identity.bus + ". Give each rank a device of its own, or, if the processes stand for "
          "machines of their own, set NCCL_HOSTID to another text in each";
    }
  }
  return "";
}

std::string Meeting::why_not(const Collective& collective, int rank, const Call& call) const {
  if (is_point_to_point(call.kind) && members_[static_cast<size_t>(call.peer)].left != "") {
    return name(rank) + " calls " + describe(call) + ", but " + name(call.peer) + " " +
        members_[static_cast<size_t>(call.peer)].left;
  }
  for (size_t i = 0; i < collective.ranks.size(); ++i) {
    const auto other = collective.ranks[i];
    const auto& there = collective.arrivals[i];
    if (!there.has_come && !members_[static_cast<size_t>(other)].left.empty()) {
      return name(rank) + " calls " + describe(call) + ", but " + name(other) + " " +
          members_[static_cast<size_t>(other)].left;
    }
    if (!there.has_come) {
      continue;
    }
    const auto differ = difference(there.call, call);
    if (!differ.empty()) {
      return "the ranks of a communicator differ in their calls' " + differ + ": where " + name(other) + " calls " +
          describe(there.call) + ", " + name(rank) + " calls " + describe(call) +
          ". All ranks have to make the same calls in the same order";
    }
    if (other != rank && there.call.thread == call.thread && there.call.group != call.group) {
      return "one thread calls " + describe(call) + " for " + name(other) + " and for " + name(rank) +
          " outside of one group. The first call can wait for the second one for ever: put both between ncclGroupStart "
          "and ncclGroupEnd";
    }
  }
  return "";
}

std::string Meeting::missing(const Collective& collective) const {
  std::vector<std::string> came, waits, absent;
  for (size_t i = 0; i < collective.ranks.size(); ++i) {
    const auto& member = members_[static_cast<size_t>(collective.ranks[i])];
    const auto& arrival = collective.arrivals[i];
    if (arrival.has_given) {
      came.push_back(name(collective.ranks[i]));
    } else if (arrival.has_come) {
      waits.push_back(name(collective.ranks[i]));
    } else {
      absent.push_back(name(collective.ranks[i]) +
                       (!member.left.empty()  ? " (which " + member.left + ")"
                        : member.last.empty() ? " (which has called nothing yet)"
                                              : " (whose last call was " + member.last + ")"));
    }
  }
  std::string text = describe(collective.first()->call) + " is not complete";
  text += absent.empty() ? "" : ": it misses " + listed(absent);
  text += waits.empty() ? "" : "; earlier work holds back " + listed(waits);
  text += came.empty() ? "" : "; there were " + listed(came);
  return text;
}

std::string Meeting::missing_to_join() const {
  std::vector<std::string> came, absent;
  for (int rank = 0; rank < ranks(); ++rank) {
    (members_[static_cast<size_t>(rank)].answers ? came : absent).push_back(name(rank));
  }
  return "a communicator of " + std::to_string(ranks()) + " ranks is not complete: it misses " + listed(absent) +
      "; there were " + listed(came) +
      ". If one thread makes several ranks, it has to do so between ncclGroupStart and ncclGroupEnd";
}

} // namespace nccl
