// Pages for allocations. An address is not given out twice while others are left: a use after free ends the process
// instead of reading what another allocation has written.
#include <sys/mman.h>
#include <unistd.h>

#include <map>

#include "state.h"

namespace standin {

namespace {

constexpr size_t kReserved = size_t{1} << 40; // of addresses; they cost nothing

struct Region {
  size_t bytes = 0;
  size_t next = 0; // what comes before was given out
  size_t allocations = 0;
};

std::mutex lock;
std::map<char*, Region>& regions = *new std::map<char*, Region>; // by address
char* current = nullptr;

size_t rounded(size_t bytes) {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

bool reserve(size_t wanted) {
  for (auto bytes = std::max(kReserved, wanted); bytes >= wanted; bytes /= 4) {
    auto* begin = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin != MAP_FAILED) {
      current = static_cast<char*>(begin);
      regions[current].bytes = bytes;
      return true;
    }
  }
  return false;
}

} // namespace

// A page that nobody may touch lies behind each allocation.
char* take_pages(size_t bytes) {
  const auto wanted = rounded(bytes), with_guard = wanted + rounded(1);
  const std::lock_guard<std::mutex> guard(lock);
  if (current == nullptr || regions[current].bytes - regions[current].next < with_guard) {
    if (!reserve(with_guard)) {
      return nullptr;
    }
  }
  auto& region = regions[current];
  auto* begin = current + region.next;
  if (mprotect(begin, wanted, PROT_READ | PROT_WRITE) != 0) {
    return nullptr;
  }
  region.next += with_guard;
  ++region.allocations;
  return begin;
}

void give_back_pages(char* begin, size_t bytes) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto region = std::prev(regions.upper_bound(begin));
  if (--region->second.allocations == 0 && region->first != current) {
    munmap(region->first, region->second.bytes);
    regions.erase(region);
    return;
  }
  mmap(begin, rounded(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

} // namespace standin
