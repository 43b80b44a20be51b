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
