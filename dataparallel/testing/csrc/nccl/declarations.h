// NCCL's header and the runtime's, with the few declarations of CUDA that this folder needs. They are declared as exported,
// because they belong to other libraries or are this library's own functions; the compiler's flags hide all else.
// CUDA's own headers include files that the
// wheels do not have, so they are left out by their guards; the include paths have to name them nevertheless.
#pragma once

#include <cstddef>
#include <cstdint>

#define __CUDA_RUNTIME_H__
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#define CUDART_VERSION 13000

#pragma GCC visibility push(default)

using cudaStream_t = struct CUstream_st*;

extern "C" {
int cudaGetDevice(int* device);
int cudaGetDeviceCount(int* count);
int cudaSetDevice(int device);
int cudaDeviceGetPCIBusId(char* text, int size, int device);
int cudaMalloc(void** address, size_t bytes);
int cudaFree(void* address);
}

#include <nccl.h>

#include "../runtime/runtime.h"

#pragma GCC visibility pop

namespace nccl {

// NCCL sets the device of a communicator around its launches, and goes back.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~OnDevice() {
    cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

} // namespace nccl
