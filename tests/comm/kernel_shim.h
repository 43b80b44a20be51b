// What kernels.cu needs to be compiled as C++ and run on the CPU, one thread of one block after the other.
//
// Kernels without barriers and shared memory may run in any order: `backwards` runs the last thread of the last block
// first. Included before the kernels by the compiler's -include.

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct Place {
  unsigned int x;
};

static Place threadIdx, blockIdx, blockDim, gridDim;

typedef void Kernel(const long long* entries, long long tensors, long long rows, long long chunk);

extern "C" void launch(Kernel* kernel, const long long* entries, long long tensors, long long rows, long long chunk,
                       unsigned int blocks, unsigned int threads, int backwards) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (unsigned int block = 0; block < blocks; ++block) {
    for (unsigned int thread = 0; thread < threads; ++thread) {
      blockIdx.x = backwards ? blocks - 1 - block : block;
      threadIdx.x = backwards ? threads - 1 - thread : thread;
      kernel(entries, tensors, rows, chunk);
    }
  }
}
