// NCCL's functions that make, look at and end communicators.
#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>

#include "counting.h"
#include "group.h"

namespace nccl {
namespace {

int device_here() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

// One rank of a new communicator, on the current device. `comm` is set at once, for a group's later functions.
ncclResult_t make_rank(const char* function, ncclComm_t* comm, std::string key, int ranks, int number, int device) {
  if (comm == nullptr || ranks < 1 || number < 0 || number >= ranks) {
    return in_group(failure(ncclInvalidArgument, std::string(function) + ": a rank has to be 0 to " +
                                                     std::to_string(ranks - 1) + "; got " + std::to_string(number)));
  }
  attach();
  const auto rank = std::make_shared<Rank>(std::move(key), number, ranks, device);
  {
    const Lock lock(library_lock());
    *comm = new_handle(rank);
  }
  const std::string name = function;
  return make({[rank] {
                 const OnDevice on(rank->device); // makes the device's context
                 const Lock lock(library_lock());
                 rank->join(rank);
                 return ncclSuccess;
               },
               [rank, name] {
                 const auto text = rank->wait_to_join();
                 const Lock lock(library_lock());
                 return text.empty() ? ncclSuccess : failure(static_cast<ncclResult_t>(rank->error), name + ": " + text);
               }});
}

// What a rank says for a split. Plain data.
struct Choice {
  int32_t colour;
  int32_t key;
};

// A collective of host memory, without a stream.
struct Split {
  std::shared_ptr<Rank> parent;
  Choice mine;
  std::vector<Choice> all;
  std::shared_ptr<Launch> launch = std::make_shared<Launch>();

  void begin() {
    const Lock lock(library_lock());
    all.resize(static_cast<size_t>(parent->ranks));
    launch->calls = 1;
    launch->deadline = now() + patience();
    Call call;
    call.kind = Kind::kSplit;
    call.dtype = ncclInt32;
    call.count = sizeof(Choice) / sizeof(int32_t);
    auto* to = reinterpret_cast<char*>(all.data());
    const auto number = parent->post(call, launch, to, nullptr);
    parent->give(number, 1, reinterpret_cast<const char*>(&mine), sizeof(mine), to);
  }

  // The ranks of this rank's colour, in the order of their keys; then of their ranks.
  std::vector<int> chosen() const {
    std::vector<int> result;
    for (int rank = 0; rank < parent->ranks; ++rank) {
      if (all[static_cast<size_t>(rank)].colour == mine.colour) {
        result.push_back(rank);
      }
    }
    std::stable_sort(result.begin(), result.end(), [&](int a, int b) {
      return all[static_cast<size_t>(a)].key < all[static_cast<size_t>(b)].key;
    });
    return result;
  }
};

std::shared_ptr<Rank> valid(const char* function, ncclComm_t comm, ncclResult_t& result) {
  const Lock lock(library_lock());
  const auto rank = rank_of(comm);
  result = ncclSuccess;
  if (!rank) {
    result = failure(ncclInvalidArgument, std::string(function) + ": the communicator does not exist, or was destroyed");
  }
  return rank;
}

ncclResult_t split(ncclComm_t comm, int colour, int key, ncclComm_t* made) {
  ncclResult_t result;
  const auto parent = valid("ncclCommSplit", comm, result);
  if (result != ncclSuccess) {
    return in_group(result);
  }
  if (parent->error) {
    return in_group(failure(static_cast<ncclResult_t>(parent->error), "ncclCommSplit: " + parent->text));
  }
  const auto splitting = std::make_shared<Split>();
  splitting->parent = parent;
  splitting->mine = {colour, key};
  *made = nullptr;
  return make({[splitting] {
                 splitting->begin();
                 Lock lock(library_lock());
                 settle(lock);
                 return ncclSuccess;
               },
               [splitting, made] {
                 const auto& old = *splitting->parent;
                 const auto text = wait_for({splitting->launch});
                 if (!text.empty()) {
                   return failure(ncclRemoteError, "ncclCommSplit: " + text);
                 }
                 if (splitting->mine.colour == NCCL_SPLIT_NOCOLOR) {
                   return ncclSuccess;
                 }
                 const auto ranks = splitting->chosen();
                 const auto mine = std::find(ranks.begin(), ranks.end(), old.rank) - ranks.begin();
                 Lock lock(library_lock());
                 const auto child = std::make_shared<Rank>(
                     child_key(old.key, "split " + std::to_string(++splitting->parent->children) + " colour " +
                                            std::to_string(splitting->mine.colour)),
                     static_cast<int>(mine), static_cast<int>(ranks.size()), old.device);
                 *made = new_handle(child);
                 // Other ranks may be this thread's, and come after this one. So nobody waits here for the others.
                 child->join(child);
                 return child->error ? failure(static_cast<ncclResult_t>(child->error), child->text) : ncclSuccess;
               }});
}

ncclResult_t shrink(ncclComm_t comm, const int* excluded, int count, ncclComm_t* made, bool aborts) {
  ncclResult_t result;
  const auto parent = valid("ncclCommShrink", comm, result);
  if (result != ncclSuccess) {
    return in_group(result);
  }
  const std::set<int> out(excluded, excluded + count);
  if (out.count(parent->rank)) {
    return in_group(failure(ncclInvalidArgument, "ncclCommShrink: rank " + std::to_string(parent->rank) +
                                                     " is excluded, so it may not call this"));
  }
  std::string key;
  int mine = 0, ranks = 0;
  for (int rank = 0; rank < parent->ranks; ++rank) {
    mine += rank < parent->rank && !out.count(rank);
    ranks += !out.count(rank);
  }
  if (aborts) {
    Lock lock(library_lock());
    parent->leave("has shrunk its communicator");
    settle(lock);
  }
  {
    const Lock lock(library_lock());
    key = child_key(parent->key, "shrunk " + std::to_string(++parent->children));
  }
  return make_rank("ncclCommShrink", made, key, ranks, mine, parent->device);
}

ncclResult_t end(const char* function, ncclComm_t comm, bool aborts) {
  count(function);
  if (comm == nullptr) {
    return ncclSuccess;
  }
  ncclResult_t result;
  const auto rank = valid(function, comm, result);
  if (result != ncclSuccess) {
    return result;
  }
  std::string text;
  if (!aborts) {
    text = rank->flush();
  }
  Lock lock(library_lock());
  text = rank->error ? "" : text; // it is known
  rank->leave(aborts ? "has aborted its communicator" : "has destroyed its communicator");
  drop_handle(comm);
  settle(lock);
  return text.empty() ? ncclSuccess : failure(ncclRemoteError, std::string(function) + ": " + text);
}

ncclResult_t init_all(ncclComm_t* comms, int count, const int* devices) {
  int there = 0;
  cudaGetDeviceCount(&there);
  if (comms == nullptr || count < 1 || (devices == nullptr && count > there)) {
    return failure(ncclInvalidArgument, "ncclCommInitAll: there are " + std::to_string(there) + " devices; got " +
                                            std::to_string(count));
  }
  for (int i = 0; devices && i < count; ++i) {
    if (devices[i] < 0 || devices[i] >= there) {
      return failure(ncclInvalidArgument, "ncclCommInitAll: there is no cuda:" + std::to_string(devices[i]));
    }
    for (int j = 0; j < i; ++j) {
      if (devices[i] == devices[j]) {
        return failure(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(j) + " and rank " +
                                             std::to_string(i) + " both on CUDA device " + std::to_string(devices[i]));
      }
    }
  }
  std::string key;
  {
    const Lock lock(library_lock());
    key = new_key();
  }
  start_group();
  for (int i = 0; i < count; ++i) {
    make_rank("ncclCommInitAll", &comms[i], key, count, i, devices ? devices[i] : i);
  }
  return end_group();
}

} // namespace
} // namespace nccl

using nccl::failure;
using nccl::Lock;

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  nccl::count("ncclGetUniqueId");
  std::memset(id, 0, sizeof(*id));
  const Lock lock(nccl::library_lock());
  std::strncpy(id->internal, nccl::new_key().c_str(), sizeof(id->internal) - 1);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  nccl::count("ncclCommInitRank");
  id.internal[sizeof(id.internal) - 1] = 0;
  return nccl::make_rank("ncclCommInitRank", comm, id.internal, ranks, rank, nccl::device_here());
}

// Communicators that do not block are made as the others are: NCCL allows a call to be done when it returns.
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  return ncclCommInitRank(comm, ranks, id, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int count, ncclUniqueId* ids,
                                      ncclConfig_t*) {
  if (count < 1) {
    return failure(ncclInvalidArgument, "ncclCommInitRankScalable: at least one id is wanted");
  }
  return ncclCommInitRank(comm, ranks, ids[0], rank);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  nccl::count("ncclCommInitAll");
  return nccl::init_all(comms, count, devices);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int colour, int key, ncclComm_t* made, ncclConfig_t*) {
  nccl::count("ncclCommSplit");
  return nccl::split(comm, colour, key, made);
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* made, ncclConfig_t*, int flags) {
  nccl::count("ncclCommShrink");
  return nccl::shrink(comm, excluded, count, made, flags & NCCL_SHRINK_ABORT);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  nccl::count("ncclCommFinalize");
  ncclResult_t result;
  const auto rank = nccl::valid("ncclCommFinalize", comm, result);
  if (result != ncclSuccess) {
    return result;
  }
  const auto text = rank->flush();
  return text.empty() ? ncclSuccess : failure(ncclRemoteError, "ncclCommFinalize: " + text);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return nccl::end("ncclCommDestroy", comm, false);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return nccl::end("ncclCommAbort", comm, true);
}

// Stops what the communicator has not done, and leaves the handle for ncclCommDestroy and ncclCommShrink.
ncclResult_t ncclCommRevoke(ncclComm_t comm, int) {
  ncclResult_t result;
  const auto rank = nccl::valid("ncclCommRevoke", comm, result);
  if (result == ncclSuccess) {
    Lock lock(nccl::library_lock());
    rank->leave("has revoked its communicator");
    rank->error = ncclInvalidUsage;
    rank->text = "the communicator was revoked";
    nccl::settle(lock);
  }
  return result;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  ncclResult_t result;
  const auto rank = nccl::valid("ncclCommCount", comm, result);
  *count = rank ? rank->ranks : 0;
  return result;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  ncclResult_t result;
  const auto rank = nccl::valid("ncclCommCuDevice", comm, result);
  *device = rank ? rank->device : -1;
  return result;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* number) {
  ncclResult_t result;
  const auto rank = nccl::valid("ncclCommUserRank", comm, result);
  *number = rank ? rank->rank : -1;
  return result;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  ncclResult_t result;
  const auto rank = nccl::valid("ncclCommGetAsyncError", comm, result);
  const Lock lock(nccl::library_lock());
  nccl::expire();
  *error = rank ? static_cast<ncclResult_t>(rank->error) : ncclInvalidArgument;
  if (rank && rank->error) {
    failure(*error, rank->text);
  }
  return result;
}

const char* ncclGetLastError(ncclComm_t) {
  return nccl::last_failure();
}

const char* ncclGetErrorString(ncclResult_t result) {
  return nccl::words_for(result);
}

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

} // extern "C"
