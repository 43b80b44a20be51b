// NCCL's header, CUDA's and the runtime's. What they declare is exported, because it belongs to other libraries or is
// this library's own functions; the compiler's flags hide all else. The headers of 16 and 8 bit floats want files that
// the wheels do not have, and are not needed.
#pragma once

#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__

#pragma GCC visibility push(default)

#include <cuda_runtime_api.h>
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
