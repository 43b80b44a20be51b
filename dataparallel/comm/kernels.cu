// The kernels of the cupy transport: one launch copies many tensors, one launch sums the tensors of all slots.
//
// This is plain CUDA C++ without headers, so that NVRTC compiles it as it is, and without shared memory or barriers, so
// that a C++ compiler can build it for the CPU. There it runs thread by thread: in tests and on the stand-in for CUDA.
// The kernels see dense memory only: pointers and counts, in one table that kernels.py packs. They check nothing. They
// keep subnormals even if a compiler is told to flush them.
//
// The table has `rows` rows of pointers, with one pointer for each of the `tensors`. Row 0 has the targets, the rows
// after it the terms, in slot order; a copy has one term. After the rows, the table has for each tensor its count (bytes
// for copies, elements for sums), then for each tensor the number of its first chunk, then the number of all chunks. A
// chunk is `chunk` bytes or elements of one tensor, a multiple of 16 bytes. A tensor's last chunk may be shorter.
//
// The upper 16 bits of a pointer are the number of an address, to which the lower 48 bits are added. The addresses travel
// with the launch, so a table that stays on the device serves any memory. An address that is 0 stands for memory that
// does not exist: a sum leaves this term out, and a copy from there writes nothing.

namespace {

typedef long long Int64;
static_assert(sizeof(Int64) == 8 && sizeof(char*) == 8, "pointers travel as 64-bit integers");

constexpr int kMaxThreads = 256;  // THREADS in kernels.py
constexpr int kVectorBytes = 16;
constexpr int kAddresses = 480;  // ADDRESSES in kernels.py: with the other parameters below 4096 bytes

}  // namespace

struct Addresses {
  long long at[kAddresses];
};

namespace {

struct Table {
  const Int64* entries;
  Int64 tensors, rows, chunk;
  const Addresses& addresses;

  __device__ Int64 address(Int64 row, Int64 tensor) const {
    const unsigned long long entry = entries[row * tensors + tensor];
    const Int64 base = addresses.at[entry >> 48];
    return base ? base + Int64(entry & 0xffffffffffffull) : 0;
  }
  __device__ char* pointer(Int64 row, Int64 tensor) const { return reinterpret_cast<char*>(address(row, tensor)); }
  __device__ Int64 count(Int64 tensor) const { return entries[rows * tensors + tensor]; }
  __device__ Int64 first_chunk(Int64 tensor) const { return entries[(rows + 1) * tensors + tensor]; }

  // The tensor that a chunk belongs to. The caller knows that it is `low` or a later one.
  __device__ Int64 tensor_of(Int64 number, Int64 low) const {
    Int64 high = tensors;
    while (high - low > 1) {
      const Int64 middle = low + (high - low) / 2;
      if (first_chunk(middle) <= number) low = middle; else high = middle;
    }
    return low;
  }

  // All pointers of a tensor, or-ed: a low bit that is 0 in the result is 0 in all of them. If they are aligned to 16
  // bytes, vectors may be used: chunks start at multiples of 16 bytes from the first element.
  __device__ Int64 address_bits(Int64 tensor) const {
    Int64 bits = 0;
    for (Int64 row = 0; row < rows; ++row) bits |= address(row, tensor);
    return bits;
  }
};

// Calls work(tensor, begin, end) for each chunk of this block, which has every gridDim.x-th chunk.
template <typename Work>
__device__ void for_each_chunk(const Table& table, Work work) {
  const Int64 chunks = table.first_chunk(table.tensors);
  Int64 tensor = 0;
  for (Int64 number = blockIdx.x; number < chunks; number += gridDim.x) {
    tensor = table.tensor_of(number, tensor);
    const Int64 begin = (number - table.first_chunk(tensor)) * table.chunk;
    const Int64 count = table.count(tensor);
    work(tensor, begin, begin + table.chunk < count ? begin + table.chunk : count);
  }
}

template <typename Value, int size>
struct alignas(sizeof(Value) * size) Vector {
  Value values[size];
};

// The type that moves this number of bytes in one access.
template <int bytes> struct BitsOf;
template <> struct BitsOf<16> { typedef Vector<unsigned int, 4> Type; };
template <> struct BitsOf<8> { typedef unsigned long long Type; };
template <> struct BitsOf<4> { typedef unsigned int Type; };
template <> struct BitsOf<2> { typedef unsigned short Type; };
template <> struct BitsOf<1> { typedef unsigned char Type; };

// ---- copies ----------------------------------------------------------------------------------------------------------

// Copies the bytes from begin to end, a whole number of words, from row 1 to row 0.
template <int width>
__device__ void copy_words(const Table& table, Int64 tensor, Int64 begin, Int64 end) {
  typedef typename BitsOf<width>::Type Word;
  constexpr int kAtOnce = 8;  // loads in flight per thread
  const Int64 words = (end - begin) / width;
  const Word* source = reinterpret_cast<const Word*>(table.pointer(1, tensor) + begin);
  Word* target = reinterpret_cast<Word*>(table.pointer(0, tensor) + begin);
  const Int64 step = blockDim.x;
  for (Int64 first = threadIdx.x; first < words; first += kAtOnce * step) {
    Word held[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * step < words) held[k] = source[first + k * step];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * step < words) target[first + k * step] = held[k];
    }
  }
}

// Copies by words of this width, or of the next smaller one to which all pointers are aligned.
template <int width>
__device__ void copy_aligned(const Table& table, Int64 tensor, Int64 begin, Int64 end, Int64 address_bits) {
  if constexpr (width > 1) {
    if (address_bits % width) return copy_aligned<width / 2>(table, tensor, begin, end, address_bits);
  }
  const Int64 whole = end - (end - begin) % width;
  copy_words<width>(table, tensor, begin, whole);
  copy_words<1>(table, tensor, whole, end);
}

__device__ void copy_chunk(const Table& table, Int64 tensor, Int64 begin, Int64 end) {
  if (!table.address(1, tensor)) return;
  copy_aligned<kVectorBytes>(table, tensor, begin, end, table.address_bits(tensor));
}

// ---- how an element is stored, and how it is added -------------------------------------------------------------------
//
// CuPy always compiles with -ftz=true. With it the compiler turns `+`, `*` and casts of floats into instructions that
// flush subnormals to zero. It does not change inline PTX, in which `add` and `cvt` keep subnormals unless `.ftz` is
// written. So on a GPU all computation with floats is inline PTX; the rest works on bits, or on doubles.

template <typename Sum>
__device__ Sum add(Sum left, Sum right) { return left + right; }

template <typename To, typename From>
__device__ To bits_as(From from) {
  union { From from; To to; } both;
  both.from = from;
  return both.to;
}

#ifdef __CUDA_ARCH__
__device__ float add(float left, float right) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(left), "f"(right));
  return sum;
}

__device__ float float_of_half(unsigned short stored) {
  float widened;
  asm("cvt.f32.f16 %0, %1;" : "=f"(widened) : "h"(stored));
  return widened;
}

__device__ unsigned short half_of_float(float sum) {
  unsigned short rounded;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(sum));
  return rounded;
}
#else  // on the CPU, whose compilers do not all have half-precision numbers
__device__ float float_of_half(unsigned short stored) {
  const unsigned int sign = (stored & 0x8000u) << 16;
  const unsigned int shifted = (stored & 0x7fffu) << 13;
  if (shifted >= 0x0f800000u) return bits_as<float>(sign | shifted | 0x7f800000u);  // infinity and NaN
  // The bias of the exponents differs by 112. Multiplying by 2^112 is exact, for subnormals too.
  return bits_as<float>(sign | bits_as<unsigned int>(bits_as<float>(shifted) * bits_as<float>(0x77800000u)));
}

__device__ unsigned short half_of_float(float sum) {
  const unsigned int magnitude = bits_as<unsigned int>(sum) & 0x7fffffffu;
  unsigned int rounded;
  if (magnitude > 0x7f800000u) rounded = 0x7e00u;        // NaN
  else if (magnitude >= 0x477ff000u) rounded = 0x7c00u;  // 65520 and above round to infinity
  else if (magnitude < 0x38800000u) {
    // Below 2^-14 halves are multiples of 2^-24, as floats from 1/2 to 1 are: adding 1/2 rounds to such a multiple.
    rounded = bits_as<unsigned int>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    rounded = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return (unsigned short)(((bits_as<unsigned int>(sum) >> 16) & 0x8000u) | rounded);
}
#endif

// float and double
template <typename Type>
struct Plain {
  typedef Type Stored;
  typedef Type Result;
  typedef Type Sum;
  static __device__ Sum widen(Stored value) { return value; }
  static __device__ Result narrow(Sum value) { return value; }
};

struct SixteenBits {
  typedef unsigned short Stored;
  typedef unsigned short Result;
  typedef float Sum;
};

struct Float16 : SixteenBits {
  static __device__ Sum widen(Stored stored) { return float_of_half(stored); }
  static __device__ Result narrow(Sum sum) { return half_of_float(sum); }
};

struct BFloat16 : SixteenBits {
  static __device__ Sum widen(Stored stored) { return bits_as<float>((unsigned int)stored << 16); }
  static __device__ Result narrow(Sum sum) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    Result rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(sum));
    return rounded;
#else
    const unsigned int bits = bits_as<unsigned int>(sum);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // rounding could turn a NaN into infinity
    return Result((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
  }
};

// The sum of 16-bit numbers as it is, in 32 bits.
template <typename Kind>
struct NotRounded : Kind {
  typedef float Result;
  static __device__ Result narrow(float sum) { return sum; }
};

// ---- sums ------------------------------------------------------------------------------------------------------------

// Sums the elements from begin to end, a whole number of vectors: row 0 becomes ((row 1 + row 2) + row 3) + ..., rounded
// once. Row 0 may be the memory of another row: a thread reads an element of every row before it writes the result. The
// terms of up to kRows rows, most often all, and of kWords vectors are loaded before the first is added, so that their
// loads overlap.
template <typename Kind, int size, int kRows, int kWords>
__device__ void sum_vectors(const Table& table, Int64 tensor, Int64 begin, Int64 end) {
  typedef Vector<typename Kind::Stored, size> Word;
  typedef typename BitsOf<sizeof(typename Kind::Result) * size < kVectorBytes ? sizeof(typename Kind::Result) * size
                                                                               : kVectorBytes>::Type Bits;
  constexpr int kStores = int(sizeof(typename Kind::Result)) * size / int(sizeof(Bits));
  const Int64 words = (end - begin) / size;
  const Int64 offset = begin * Int64(sizeof(typename Kind::Stored));
  Bits* results = reinterpret_cast<Bits*>(table.pointer(0, tensor) + begin * Int64(sizeof(typename Kind::Result)));
  const Int64 step = blockDim.x;
  const Word* terms[kRows] = {};
  for (Int64 first = threadIdx.x; first < words; first += kWords * step) {
    typename Kind::Sum sums[kWords][size];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int i = 0; i < size; ++i) sums[w][i] = typename Kind::Sum(-0.0);  // 0 + -0 would lose the sign
    }
    bool has_term = false;
    for (Int64 row = 1; row < table.rows; row += kRows) {
      // The pointers of rows that all fit are read once, not again after each store.
      if (first == threadIdx.x || table.rows > kRows + 1) {
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          const char* start = row + k < table.rows ? table.pointer(row + k, tensor) : nullptr;
          terms[k] = start ? reinterpret_cast<const Word*>(start + offset) : nullptr;
        }
      }
      Word held[kRows][kWords] = {};
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          if (terms[k] && first + w * step < words) held[k][w] = terms[k][first + w * step];
        }
      }
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        if (!terms[k]) continue;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
#pragma unroll
          for (int i = 0; i < size; ++i) sums[w][i] = add(sums[w][i], Kind::widen(held[k][w].values[i]));
        }
        has_term = true;
      }
    }
    if (!has_term) continue;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (first + w * step >= words) continue;
      // The union makes the vector one store, or two. Otherwise elements below 32 bits would be stored one by one.
      union {
        typename Kind::Result values[size];
        Bits bits[kStores];
      } rounded;
#pragma unroll
      for (int i = 0; i < size; ++i) rounded.values[i] = Kind::narrow(sums[w][i]);
#pragma unroll
      for (int k = 0; k < kStores; ++k) results[(first + w * step) * kStores + k] = rounded.bits[k];
    }
  }
}

// With few rows a thread loads several vectors of each, so that as many loads are in flight as with eight.
template <typename Kind, int size>
__device__ void sum_all(const Table& table, Int64 tensor, Int64 begin, Int64 end) {
  if (table.rows <= 3) sum_vectors<Kind, size, 2, 4>(table, tensor, begin, end);
  else if (table.rows <= 5) sum_vectors<Kind, size, 4, 2>(table, tensor, begin, end);
  else sum_vectors<Kind, size, 8, 1>(table, tensor, begin, end);
}

template <typename Kind>
__device__ void sum_chunk(const Table& table, Int64 tensor, Int64 begin, Int64 end) {
  constexpr int kElements = kVectorBytes / int(sizeof(typename Kind::Stored));
  Int64 whole = begin;
  if (table.address_bits(tensor) % kVectorBytes == 0) {
    whole = end - (end - begin) % kElements;
    sum_all<Kind, kElements>(table, tensor, begin, whole);
  }
  sum_all<Kind, 1>(table, tensor, whole, end);
}

}  // namespace

// ---- the kernels: any number of blocks, at most kMaxThreads threads in each ------------------------------------------

// The addresses are read where the launch put them. Without `__grid_constant__` each thread would copy them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
#define IN_PLACE __grid_constant__
#else
#define IN_PLACE
#endif

#define KERNEL(name, work)                                                                                 \
  extern "C" __global__ void __launch_bounds__(kMaxThreads)                                                \
      name(const long long* entries, long long tensors, long long rows, long long chunk,                   \
           const IN_PLACE Addresses addresses) {                                                           \
    const Table table = {entries, tensors, rows, chunk, addresses};                                        \
    for_each_chunk(table, [&](Int64 tensor, Int64 begin, Int64 end) { work(table, tensor, begin, end); }); \
  }

KERNEL(copy_many, copy_chunk)

#define SUM_KERNEL(name, ...) KERNEL(name, (sum_chunk<__VA_ARGS__>))

SUM_KERNEL(sum_float64, Plain<double>)
SUM_KERNEL(sum_float32, Plain<float>)
SUM_KERNEL(sum_float16, Float16)
SUM_KERNEL(sum_bfloat16, BFloat16)
SUM_KERNEL(sum_float16_to_float32, NotRounded<Float16>)
SUM_KERNEL(sum_bfloat16_to_float32, NotRounded<BFloat16>)
