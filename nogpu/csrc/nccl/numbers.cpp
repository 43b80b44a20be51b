#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "declarations.h"

namespace nccl {
namespace {

// A float with fewer bits than float32. `kFinite`: it has no infinity, and all bits set are the only NaN.
template <int kExponent, int kMantissa, bool kFinite = false>
struct SmallFloat {
  using Bits = std::conditional_t<(1 + kExponent + kMantissa > 8), uint16_t, uint8_t>;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t kTop = (1u << (kExponent + kMantissa)) - 1; // all bits but the sign
  static constexpr uint32_t kInfinity = ((1u << kExponent) - 1) << kMantissa;
  static constexpr uint32_t kNotANumber = kFinite ? kTop : kInfinity | (1u << (kMantissa - 1));

  Bits bits = 0;

  SmallFloat() = default;
  explicit SmallFloat(float value) {
    uint32_t whole = 0;
    std::memcpy(&whole, &value, sizeof(whole));
    const uint32_t sign = (whole >> 31) << (kExponent + kMantissa);
    bits = static_cast<Bits>(sign | rounded(whole & 0x7fffffffu));
  }

  explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits) >> (kExponent + kMantissa) << 31;
    const uint32_t rest = bits & kTop;
    const int exponent = static_cast<int>(rest >> kMantissa);
    const auto mantissa = static_cast<float>(rest & ((1u << kMantissa) - 1));
    float value = 0;
    if (kFinite ? rest == kTop : rest > kInfinity) {
      value = NAN;
    } else if (!kFinite && rest == kInfinity) {
      value = INFINITY;
    } else if (exponent == 0) {
      value = std::ldexp(mantissa, 1 - kBias - kMantissa);
    } else {
      value = std::ldexp(mantissa + static_cast<float>(1u << kMantissa), exponent - kBias - kMantissa);
    }
    return sign ? -value : value;
  }

 private:
  // To the nearest, ties to even. `whole` is a float32 without its sign.
  static uint32_t rounded(uint32_t whole) {
    if (whole > 0x7f800000u) {
      return kNotANumber;
    }
    const uint32_t field = whole >> 23;
    const int exponent = static_cast<int>(std::max(field, 1u)) - 127 + kBias;
    uint32_t number = whole & 0x7fffffu;
    int dropped = 23 - kMantissa;
    if (exponent >= 1 && field != 0) {
      number |= static_cast<uint32_t>(std::min(exponent, 1 << kExponent)) << 23;
    } else {
      number |= field ? 1u << 23 : 0u;
      dropped += 1 - exponent;
    }
    if (dropped > 31) {
      return 0;
    }
    const uint64_t half = (uint64_t{1} << (dropped - 1)) - 1 + ((number >> dropped) & 1);
    const auto result = static_cast<uint32_t>((number + half) >> dropped);
    if (kFinite) {
      return std::min(result, kTop - 1); // saturates, as NCCL's conversions of this dtype do
    }
    return std::min(result, kInfinity);
  }
};

using Float16 = SmallFloat<5, 10>;
using BFloat16 = SmallFloat<8, 7>;
using Float8E4M3 = SmallFloat<4, 3, true>;
using Float8E5M2 = SmallFloat<5, 2>;

// In what the terms of a dtype are added. Integers wrap around, so they are added without a sign.
template <typename T, typename = void>
struct Sum {
  using Type = float;
};
template <typename T>
struct Sum<T, std::enable_if_t<std::is_integral_v<T>>> {
  using Type = T;
};
template <>
struct Sum<double> {
  using Type = double;
};

template <typename S>
S added(S a, S b) {
  if constexpr (std::is_integral_v<S>) {
    return static_cast<S>(static_cast<std::make_unsigned_t<S>>(a) + static_cast<std::make_unsigned_t<S>>(b));
  } else {
    return a + b;
  }
}

template <typename S>
S multiplied(S a, S b) {
  if constexpr (std::is_integral_v<S>) {
    return static_cast<S>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <typename S>
S combined(int32_t op, S a, S b) {
  switch (op) {
    case ncclProd:
      return multiplied(a, b);
    case ncclMax:
      return a < b || a != a ? b : a;
    case ncclMin:
      return b < a || a != a ? b : a;
    default:
      return added(a, b);
  }
}

template <typename T>
void reduce_as(int32_t op, const std::vector<const char*>& terms, const std::vector<double>& factors, size_t begin,
               size_t count, char* out) {
  using S = typename Sum<T>::Type;
  const auto term = [&](size_t rank, size_t i) {
    T value;
    std::memcpy(static_cast<void*>(&value), terms[rank] + i * sizeof(T), sizeof(T));
    const auto wide = static_cast<S>(value);
    return factors.empty() ? wide : multiplied(wide, static_cast<S>(factors[rank]));
  };
  for (size_t i = begin; i < begin + count; ++i) {
    S sum = term(0, i);
    for (size_t rank = 1; rank < terms.size(); ++rank) {
      sum = combined(op, sum, term(rank, i));
    }
    if (op == ncclAvg) {
      sum = static_cast<S>(sum / static_cast<S>(terms.size()));
    }
    const T result(static_cast<T>(sum));
    std::memcpy(out + (i - begin) * sizeof(T), static_cast<const void*>(&result), sizeof(T));
  }
}

template <typename F>
void with_type(int32_t dtype, F&& f) {
  switch (dtype) {
    case ncclInt8:
      return f(int8_t{});
    case ncclUint8:
      return f(uint8_t{});
    case ncclInt32:
      return f(int32_t{});
    case ncclUint32:
      return f(uint32_t{});
    case ncclInt64:
      return f(int64_t{});
    case ncclUint64:
      return f(uint64_t{});
    case ncclFloat16:
      return f(Float16{});
    case ncclFloat32:
      return f(float{});
    case ncclFloat64:
      return f(double{});
    case ncclBfloat16:
      return f(BFloat16{});
    case ncclFloat8e4m3:
      return f(Float8E4M3{});
    default:
      return f(Float8E5M2{});
  }
}

} // namespace

void reduce(int32_t dtype, int32_t op, const std::vector<const char*>& terms, const std::vector<double>& factors,
            size_t begin, size_t count, char* out) {
  with_type(dtype, [&](auto zero) {
    reduce_as<decltype(zero)>(op, terms, factors, begin, count, out);
  });
}

double read_number(int32_t dtype, const void* address) {
  double result = 0;
  with_type(dtype, [&](auto value) {
    std::memcpy(static_cast<void*>(&value), address, sizeof(value));
    if constexpr (std::is_arithmetic_v<decltype(value)>) {
      result = static_cast<double>(value);
    } else {
      result = static_cast<double>(static_cast<float>(value));
    }
  });
  return result;
}

} // namespace nccl
