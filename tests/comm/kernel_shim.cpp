// The kernels and, to be tried with every kind of float, how they round their sums.

#include "kernels.cu"

template <typename Kind>
static void narrow(const float* sums, unsigned short* rounded, long long count) {
  for (long long i = 0; i < count; ++i) rounded[i] = Kind::narrow(sums[i]);
}

extern "C" void narrow_float16(const float* sums, unsigned short* rounded, long long count) {
  narrow<Float16>(sums, rounded, count);
}

extern "C" void narrow_bfloat16(const float* sums, unsigned short* rounded, long long count) {
  narrow<BFloat16>(sums, rounded, count);
}

typedef void Kernel(const long long* entries, long long tensors, long long rows, long long chunk, Addresses addresses);

// Kernels without barriers and shared memory may run in any order: `backwards` runs the last thread of the last block
// first.
extern "C" void launch(Kernel* kernel, const long long* entries, long long tensors, long long rows, long long chunk,
                       const Addresses* addresses, unsigned int blocks, unsigned int threads, int backwards) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (unsigned int block = 0; block < blocks; ++block) {
    for (unsigned int thread = 0; thread < threads; ++thread) {
      blockIdx.x = backwards ? blocks - 1 - block : block;
      threadIdx.x = backwards ? threads - 1 - thread : thread;
      kernel(entries, tensors, rows, chunk, *addresses);
    }
  }
}
