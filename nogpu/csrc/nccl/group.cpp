#include "group.h"

#include <algorithm>
#include <map>
#include <utility>

namespace nccl {
namespace {

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::string text; // of the error
  std::vector<Issued> calls;
  std::vector<Making> makings;
  std::vector<std::shared_ptr<Rank>> used;
};
thread_local Group group;

ncclResult_t run(Group& ended) {
  if (ended.error != ncclSuccess) {
    return failure(ended.error, ended.text);
  }
  if (!ended.makings.empty() && !ended.calls.empty()) {
    return failure(ncclInvalidUsage, "a group makes communicators and launches collectives; NCCL wants two groups");
  }
  auto result = ncclSuccess;
  for (const auto& each : ended.makings) {
    const auto begun = each.begin();
    result = result == ncclSuccess ? begun : result;
  }
  for (const auto& each : ended.makings) {
    const auto made = each.end();
    result = result == ncclSuccess ? made : result;
  }
  return ended.calls.empty() ? result : launch(ended.calls);
}

} // namespace

ncclResult_t issue(Issued call) {
  group.calls.push_back(std::move(call));
  return ncclSuccess;
}

ncclResult_t make(Making making) {
  start_group();
  group.makings.push_back(std::move(making));
  return end_group();
}

ncclResult_t start_group() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t in_group(ncclResult_t result) {
  if (group.depth == 0) {
    return result;
  }
  if (result != ncclSuccess && group.error == ncclSuccess) {
    group.error = result;
    group.text = last_failure();
  }
  return ncclSuccess;
}

ncclResult_t end_group() {
  if (group.depth == 0) {
    return failure(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart in this thread");
  }
  if (--group.depth > 0) {
    return ncclSuccess;
  }
  auto ended = std::exchange(group, {});
  const auto result = run(ended);
  const Lock lock(library_lock());
  for (const auto& rank : ended.used) {
    --rank->uses;
  }
  return result;
}

ncclResult_t use(const std::shared_ptr<Rank>& rank, const char* function) {
  const Lock lock(library_lock());
  const auto thread = thread_number();
  if (rank->uses > 0 && rank->user != thread) {
    return failure(ncclInvalidUsage, std::string(function) + " for rank " + std::to_string(rank->rank) +
                                         " (cuda:" + std::to_string(rank->device) +
                                         "), whose communicator another thread is launching on: a communicator may be "
                                         "used by one thread at a time. Let the threads take turns by a lock");
  }
  rank->user = thread;
  ++rank->uses;
  group.used.push_back(rank);
  return ncclSuccess;
}

} // namespace nccl
