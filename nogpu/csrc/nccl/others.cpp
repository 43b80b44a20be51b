// NCCL's functions for operations that a program makes, for memory, and those that the stand-in refuses: they need
// kernels that call NCCL, or one-sided access. Torch's libraries import them.
#include <cstring>

#include "group.h"
#include "numbers.h"

namespace nccl {
namespace {

ncclResult_t refuse(const char* function) {
  return failure(ncclInvalidUsage, std::string(function) + ": the stand-in for NCCL does not have this function");
}

// The rank, or null after keeping an error.
std::shared_ptr<Rank> known(const char* function, ncclComm_t comm) {
  const Lock lock(library_lock());
  const auto rank = rank_of(comm);
  if (!rank) {
    failure(ncclInvalidArgument, std::string(function) + ": the communicator does not exist, or was destroyed");
  }
  return rank;
}

} // namespace
} // namespace nccl

using nccl::failure;
using nccl::known;
using nccl::Lock;
using nccl::refuse;

#pragma GCC visibility push(default)
extern "C" {

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  standin::count_call("ncclRedOpCreatePreMulSum");
  const auto rank = known("ncclRedOpCreatePreMulSum", comm);
  if (!rank || dtype < 0 || dtype >= ncclNumTypes) {
    return rank ? failure(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: there is no dtype of this number")
                : ncclInvalidArgument;
  }
  nccl::Multiple made;
  made.exists = true;
  made.dtype = dtype;
  if (residence == ncclScalarHostImmediate) {
    made.factor = nccl::read_number(dtype, scalar);
  } else if (standin::memory_of(scalar) == nullptr) {
    return failure(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: the scalar is no memory that a device can read");
  } else {
    made.address = scalar;
  }
  const Lock lock(nccl::library_lock());
  *op = static_cast<ncclRedOp_t>(ncclNumOps + rank->multiples.size());
  rank->multiples.push_back(made);
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  const auto rank = known("ncclRedOpDestroy", comm);
  if (!rank) {
    return ncclInvalidArgument;
  }
  const Lock lock(nccl::library_lock());
  const auto place = static_cast<size_t>(op) - ncclNumOps;
  if (op < ncclNumOps || place >= rank->multiples.size() || !rank->multiples[place].exists) {
    return failure(ncclInvalidArgument, "ncclRedOpDestroy: the operation does not exist, or was destroyed");
  }
  rank->multiples[place].exists = false;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** address, size_t bytes) {
  standin::count_call("ncclMemAlloc");
  return cudaMalloc(address, bytes) == 0 ? ncclSuccess
                                         : failure(ncclUnhandledCudaError, "ncclMemAlloc: cudaMalloc of " +
                                                                               std::to_string(bytes) + " bytes failed");
}

ncclResult_t ncclMemFree(void* address) {
  standin::count_call("ncclMemFree");
  return cudaFree(address) == 0 ? ncclSuccess : failure(ncclUnhandledCudaError, "ncclMemFree: cudaFree failed");
}

// Registration makes NCCL faster, and here nothing.
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t bytes, void** handle) {
  standin::count_call("ncclCommRegister");
  const auto* memory = standin::memory_of(buffer);
  if (memory == nullptr || static_cast<char*>(buffer) + bytes > memory->begin + memory->bytes) {
    return failure(ncclInvalidArgument, "ncclCommRegister: the buffer is no memory of CUDA, or ends beyond it");
  }
  *handle = buffer;
  return known("ncclCommRegister", comm) ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void*) {
  return known("ncclCommDeregister", comm) ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommSuspend(ncclComm_t comm, int) {
  return known("ncclCommSuspend", comm) ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommResume(ncclComm_t comm) {
  return known("ncclCommResume", comm) ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t, ncclUniqueId*) {
  return refuse("ncclCommGetUniqueId");
}
ncclResult_t ncclCommGrow(ncclComm_t, int, const ncclUniqueId*, int, ncclComm_t*, ncclConfig_t*) {
  return refuse("ncclCommGrow");
}
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int) {
  return refuse("ncclCommWindowRegister");
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) {
  return refuse("ncclCommWindowDeregister");
}
ncclResult_t ncclWinGetUserPtr(ncclComm_t, ncclWindow_t, void**) {
  return refuse("ncclWinGetUserPtr");
}
ncclResult_t ncclPutSignal(const void*, size_t, ncclDataType_t, int, ncclWindow_t, size_t, int, int, unsigned int,
                           ncclComm_t, cudaStream_t) {
  return refuse("ncclPutSignal");
}
ncclResult_t ncclSignal(int, int, int, unsigned int, ncclComm_t, cudaStream_t) {
  return refuse("ncclSignal");
}
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0) // torch 2.11 comes with 2.28
ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t, uint64_t* value) {
  *value = 0;
  return known("ncclCommMemStats", comm) ? ncclSuccess : ncclInvalidArgument;
}
ncclResult_t ncclWaitSignal(int, ncclWaitSignalDesc_t*, ncclComm_t, cudaStream_t) {
  return refuse("ncclWaitSignal");
}
#endif

// Declared in headers for kernels that call NCCL, which are not included: nothing looks at the arguments.
ncclResult_t ncclDevCommCreate(ncclComm_t, const void*, void*) {
  return refuse("ncclDevCommCreate");
}
ncclResult_t ncclDevCommDestroy(ncclComm_t, const void*) {
  return refuse("ncclDevCommDestroy");
}
ncclResult_t ncclCommQueryProperties(ncclComm_t, void*) {
  return refuse("ncclCommQueryProperties");
}
ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t, size_t, int, void**) {
  return refuse("ncclGetLsaDevicePointer");
}
ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t, size_t, void**) {
  return refuse("ncclGetLsaMultimemDevicePointer");
}
ncclResult_t ncclGetMultimemDevicePointer(ncclWindow_t, size_t, void*, void**) {
  return refuse("ncclGetMultimemDevicePointer");
}
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t, size_t, int, void**) {
  return refuse("ncclGetPeerDevicePointer");
}

} // extern "C"
#pragma GCC visibility pop
