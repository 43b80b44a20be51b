// Groups of calls, which belong to the thread that has opened them, and the launches that they end in. A call outside
// of a group is a group of its own.
//
// One thread's group may hold several ranks of a communicator. Their calls are posted first, and then every communicator
// launches what is its own, as one launch: NCCL runs the calls of a group in one kernel, on all their streams, and
// promises no order between them.
//
// For the clocks, the launch reads and writes the rank's buffers on its stream. What NCCL promises beyond that, and
// what is assumed here, is only what the values need: work on a rank's stream after the collective comes after the work
// that another rank's stream had been given before it, if the values of the first depend on those of the second. So a
// receiver of a broadcast comes after the root's earlier work, but the root does not come after the receivers', and
// nobody comes after the other ranks' own launches: a kernel may be done before the others are. A launch that reads
// nothing of its own (a receiver's) comes after the sender's earlier work itself, if one group launches both. One that
// reads does not: the kernel may read its own buffer before the others have begun.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "errors.h"
#include "rank.h"

namespace nccl {

// A call with its buffers.
struct Issued {
  std::shared_ptr<Rank> rank;
  Call call;
  const char* send = nullptr;
  char* receive = nullptr;
  standin::StreamName stream;
  Multiple multiple;
};

// Work for the end of the group, or for now: calls, and making communicators.
ncclResult_t issue(Issued call);
// All `begin` are called before the first `end`. Each returns the group's error.
struct Making {
  std::function<ncclResult_t()> begin;
  std::function<ncclResult_t()> end;
};
ncclResult_t make(Making making);

ncclResult_t start_group();
ncclResult_t end_group();
// An error of a call in a group is the error of the whole group, and ncclGroupEnd alone returns it: torch ends its groups
// while it unwinds, and would end the process if both did.
ncclResult_t in_group(ncclResult_t result);

// Marks the rank as used by the calling thread, until its group ends. Refuses a second thread.
ncclResult_t use(const std::shared_ptr<Rank>& rank, const char* function);

// Launches calls at once; see launch.cpp.
ncclResult_t launch(std::vector<Issued>& calls);

} // namespace nccl
