// What device code finds without an include, for the host's C++ compiler. ../program.cpp includes it before a program's
// source, and nobody else does. Marked words that begin with __standin are read by ../rewrite.cpp after preprocessing.
//
// __CUDA_ARCH__ and __CUDACC__ are not defined: a source that has a branch for the host takes it. What is not here does
// not compile, so it names itself in the compiler's log; inline PTX is such a thing. Numbers are the host's: floats are
// neither flushed to zero nor contracted, whatever the options say.
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <math.h>
#include <memory>
#include <type_traits>
#include <utility>

#include <vector_types.h>
#include <vector_functions.h>

#include "module.h"

// CUDA's headers have given some of these words another meaning for the host.
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __managed__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
#undef __noinline__
#undef __inline_hint__
#undef __align__
#define __global__ __standin_global__
#define __shared__ __standin_shared__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))

#ifndef __CUDACC_VER_MAJOR__
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __CUDACC_VER_BUILD__ 0
#endif

// The runtime sets these for each thread. They may not be const: the compiler would take their values for known.
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace standin {
void* shared = nullptr;
const Engine* engine = nullptr;
inline void* dynamic_shared() { return shared; }
} // namespace standin

inline void __syncthreads() { standin::engine->wait_for_block(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { standin::engine->wait_for_warp(mask); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) {}
[[noreturn]] inline void __trap() {
  standin::engine->stop("the kernel called __trap");
  __builtin_unreachable();
}

#undef assert
#define assert(condition) \
  ((condition) ? (void)0 : standin::engine->stop("an assertion of the kernel failed: " #condition))

#include "atomics.h"
#include "entries.h"
#include "numbers.h"
#include "warps.h"
