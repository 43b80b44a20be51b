// NCCL's functions that make, look at and end communicators.
#include <cstring>

#include "communicators.h"

namespace nccl {
namespace {

int device_here() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

ncclResult_t end(const char* function, ncclComm_t comm, bool aborts) {
  standin::count_call(function);
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

std::shared_ptr<Rank> valid(const char* function, ncclComm_t comm, ncclResult_t& result) {
  const Lock lock(library_lock());
  const auto rank = rank_of(comm);
  result = ncclSuccess;
  if (!rank) {
    result = failure(ncclInvalidArgument, std::string(function) + ": the communicator does not exist, or was destroyed");
  }
  return rank;
}

} // namespace nccl

using nccl::failure;
using nccl::Lock;

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  standin::count_call("ncclGetUniqueId");
  std::memset(id, 0, sizeof(*id));
  const Lock lock(nccl::library_lock());
  std::strncpy(id->internal, nccl::new_key().c_str(), sizeof(id->internal) - 1);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  standin::count_call("ncclCommInitRank");
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
  standin::count_call("ncclCommInitAll");
  return nccl::init_all(comms, count, devices);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  standin::count_call("ncclCommFinalize");
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
