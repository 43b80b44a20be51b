// What kernels.cu needs to be compiled as C++ and run on the CPU, one thread of one block after the other.
//
// Included before the kernels by the compiler's -include.

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct Place {
  unsigned int x;
};

static Place threadIdx, blockIdx, blockDim, gridDim;
