// The memory that a running kernel reads and writes, to the byte, as the compiler's instrumentation tells it: each
// access of the compiled code. It does not see calls of memcpy and memset with large sizes, accesses beyond an
// allocation in its last page of 4096 bytes, and it takes atomic operations for writes. modules.cpp hands it to the
// watcher after the kernel. blocks.cpp calls it before each access. It knows allocations (runtime.h), no clocks.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime.h"

namespace standin {

// Of one launch at a time. Not safe for threads: kernels run one at a time.
class Touched {
 public:
  void forget();
  // Memory that is the kernel's own: its stack, shared and static variables. It is not told to anybody.
  void add_own(const void* begin, size_t bytes);
  // Returns why the access is impossible, or null. The text lives until the next call. That a device has not mapped the
  // memory of another is no matter here: `check_access` says so.
  const char* touch(const void* address, size_t bytes, bool writes);
  // In the order of addresses, neighbours joined; a part is read and written if it is in the list twice. Gaps are
  // filled up, the smallest first, where there are more than `most` parts: then reads and writes are told that were not
  // done.
  std::vector<Part> parts(size_t most = 4096) const;

 private:
  static constexpr size_t kPage = 4096;
  struct Page {
    std::bitset<kPage> read, written;
  };
  struct Cached {
    uintptr_t number = 0; // of the page; 0 is none
    Page* page = nullptr; // null if it is the kernel's own
  };
  Page* page_of(uintptr_t address); // null if it is in no allocation
  bool own(uintptr_t address) const;

  std::map<uintptr_t, std::unique_ptr<Page>> pages_;
  std::vector<std::pair<uintptr_t, uintptr_t>> own_;
  std::array<Cached, 1024> cache_;
  std::string problem_;
};

} // namespace standin
