// The functions that the compiler calls before each access of a kernel to memory. ../program.cpp links this file into
// every module, so that no other library of the process finds these names here.
//
// The kernels are compiled as for the compiler's thread sanitizer (its calls are an interface that both GCC and Clang
// have), but its library is not linked. Accesses to variables that the compiler keeps in registers make no call.

#include "module.h"

namespace standin {
extern const Engine* engine; // of kernel.h
}

#pragma GCC visibility push(hidden)

namespace {
// There is no engine before the first launch, when constructors of static variables run.
void touch(const void* address, size_t bytes, bool writes) {
  if (standin::engine != nullptr) standin::engine->touch(address, bytes, writes);
}
void reads(const void* address, size_t bytes) { touch(address, bytes, false); }
void writes(const void* address, size_t bytes) { touch(address, bytes, true); }
} // namespace

#define STANDIN_ACCESS(bytes)                                                                  \
  void __tsan_read##bytes(void* address) { reads(address, bytes); }                            \
  void __tsan_write##bytes(void* address) { writes(address, bytes); }                          \
  void __tsan_read_write##bytes(void* address) { writes(address, bytes); }                     \
  void __tsan_volatile_read##bytes(void* address) { reads(address, bytes); }                   \
  void __tsan_volatile_write##bytes(void* address) { writes(address, bytes); }                 \
  void __tsan_unaligned_read##bytes(void* address) { reads(address, bytes); }                  \
  void __tsan_unaligned_write##bytes(void* address) { writes(address, bytes); }                \
  void __tsan_unaligned_read_write##bytes(void* address) { writes(address, bytes); }           \
  void __tsan_unaligned_volatile_read##bytes(void* address) { reads(address, bytes); }         \
  void __tsan_unaligned_volatile_write##bytes(void* address) { writes(address, bytes); }

extern "C" {

STANDIN_ACCESS(1)
STANDIN_ACCESS(2)
STANDIN_ACCESS(4)
STANDIN_ACCESS(8)
STANDIN_ACCESS(16)

void __tsan_read_range(void* address, unsigned long bytes) { reads(address, bytes); }
void __tsan_write_range(void* address, unsigned long bytes) { writes(address, bytes); }

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

// Large structures are copied by these functions, which nothing else tells of.
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  reads(from, bytes);
  writes(to, bytes);
  return __builtin_memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  writes(to, bytes);
  return __builtin_memset(to, value, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  reads(from, bytes);
  writes(to, bytes);
  return __builtin_memmove(to, from, bytes);
}

} // extern "C"
