// What kernels.cu needs to be compiled as C++ and run on the CPU, one thread of one block after the other.
//
// Kernels without barriers and shared memory may run in any order: `backwards` runs the last thread of the last block
// first. Included before the kernels by the compiler's -include.

#include <cstring>

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct Place {
  unsigned int x;
};

static float float_with(unsigned int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static unsigned int bits_in(float value) {
  unsigned int bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// What a GPU has instructions for.
static float float_of_half(unsigned short stored) {
  const unsigned int sign = (stored & 0x8000u) << 16;
  const unsigned int shifted = (stored & 0x7fffu) << 13;
  if (shifted >= 0x0f800000u) return float_with(sign | shifted | 0x7f800000u);  // infinity and NaN
  // The bias of the exponents differs by 112. Multiplying by 2^112 is exact, for subnormals too.
  return float_with(sign | bits_in(float_with(shifted) * float_with(0x77800000u)));
}

static unsigned short half_of_float(float sum) {
  const unsigned int magnitude = bits_in(sum) & 0x7fffffffu;
  unsigned int rounded;
  if (magnitude > 0x7f800000u) rounded = 0x7e00u;        // NaN
  else if (magnitude >= 0x477ff000u) rounded = 0x7c00u;  // 65520 and above round to infinity
  else if (magnitude < 0x38800000u) {
    // Below 2^-14 halves are multiples of 2^-24, as floats from 1/2 to 1 are: adding 1/2 rounds to such a multiple.
    rounded = bits_in(float_with(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    rounded = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return (unsigned short)(((bits_in(sum) >> 16) & 0x8000u) | rounded);
}

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
