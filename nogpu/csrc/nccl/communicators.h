// Parts of the functions that make communicators.
#pragma once

#include <memory>
#include <string>

#include "group.h"

namespace nccl {

// One rank of a new communicator, at the end of the group. `comm` is set at once.
ncclResult_t make_rank(const char* function, ncclComm_t* comm, std::string key, int ranks, int number, int device);
// The rank of a handle, or null and an error.
std::shared_ptr<Rank> valid(const char* function, ncclComm_t comm, ncclResult_t& result);

} // namespace nccl
