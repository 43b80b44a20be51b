// Functions of numbers that device code has and the host's <math.h> has not: bits, rounding, fast versions. Only
// kernel.h includes it. The fast versions are as exact as the others.
#pragma once

template <typename Value>
inline Value __ldg(const Value* address) { return *address; }

namespace standin {
template <typename To, typename From>
inline To same_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "a value of the same size");
  To result;
  __builtin_memcpy(&result, &value, sizeof result);
  return result;
}
} // namespace standin

inline int __float_as_int(float value) { return standin::same_bits<int>(value); }
inline unsigned __float_as_uint(float value) { return standin::same_bits<unsigned>(value); }
inline float __int_as_float(int value) { return standin::same_bits<float>(value); }
inline float __uint_as_float(unsigned value) { return standin::same_bits<float>(value); }
inline long long __double_as_longlong(double value) { return standin::same_bits<long long>(value); }
inline double __longlong_as_double(long long value) { return standin::same_bits<double>(value); }

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(unsigned(value)); }
inline int __clzll(long long value) { return value == 0 ? 64 : __builtin_clzll((unsigned long long)value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __mulhi(int left, int right) { return int((long long)left * right >> 32); }
inline unsigned __umulhi(unsigned left, unsigned right) { return unsigned((unsigned long long)left * right >> 32); }
inline unsigned long long __umul64hi(unsigned long long left, unsigned long long right) {
  return (unsigned long long)((unsigned __int128)left * right >> 64);
}

#if !defined(__GLIBC__) || __GLIBC__ < 2 || (__GLIBC__ == 2 && __GLIBC_MINOR__ < 42) // later ones have them
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline double rsqrt(double value) { return 1.0 / sqrt(value); }
#endif
inline float rsqrt(float value) { return rsqrtf(value); }
inline float __fdividef(float left, float right) { return left / right; }
inline float __expf(float value) { return expf(value); }
inline float __logf(float value) { return logf(value); }
inline float __log2f(float value) { return log2f(value); }
inline float __sinf(float value) { return sinf(value); }
inline float __cosf(float value) { return cosf(value); }
inline float __powf(float base, float exponent) { return powf(base, exponent); }
inline float __saturatef(float value) { return value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f; }
inline float __fadd_rn(float left, float right) { return left + right; }
inline float __fmul_rn(float left, float right) { return left * right; }
inline float __fmaf_rn(float left, float right, float term) { return fmaf(left, right, term); }
inline double __dadd_rn(double left, double right) { return left + right; }
inline double __dmul_rn(double left, double right) { return left * right; }
inline double __fma_rn(double left, double right, double term) { return fma(left, right, term); }

// Global in device code, for operands of one type or of two.
template <typename One, typename Other,
          std::enable_if_t<std::is_arithmetic<One>::value && std::is_arithmetic<Other>::value, int> = 0>
inline std::common_type_t<One, Other> min(One one, Other other) {
  typedef std::common_type_t<One, Other> Value;
  if constexpr (std::is_floating_point<Value>::value) return std::fmin(Value(one), Value(other));
  else return Value(other) < Value(one) ? Value(other) : Value(one);
}
template <typename One, typename Other,
          std::enable_if_t<std::is_arithmetic<One>::value && std::is_arithmetic<Other>::value, int> = 0>
inline std::common_type_t<One, Other> max(One one, Other other) {
  typedef std::common_type_t<One, Other> Value;
  if constexpr (std::is_floating_point<Value>::value) return std::fmax(Value(one), Value(other));
  else return Value(one) < Value(other) ? Value(other) : Value(one);
}
