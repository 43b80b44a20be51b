#include "touched.h"

#include <algorithm>
#include <cstdio>

namespace standin {
namespace {

std::string hex(uintptr_t address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

struct Range {
  uintptr_t begin, end;
};

// Fills up the smallest gaps until no more than `most` ranges are left.
void join(std::vector<Range>& ranges, size_t most) {
  if (ranges.size() <= most) return;
  std::vector<uintptr_t> gaps;
  for (size_t i = 1; i < ranges.size(); ++i) gaps.push_back(ranges[i].begin - ranges[i - 1].end);
  std::nth_element(gaps.begin(), gaps.begin() + static_cast<long>(ranges.size() - most - 1), gaps.end());
  const uintptr_t filled = gaps[ranges.size() - most - 1];
  std::vector<Range> joined;
  for (const Range& range : ranges) {
    if (!joined.empty() && range.begin - joined.back().end <= filled) joined.back().end = range.end;
    else joined.push_back(range);
  }
  ranges = std::move(joined);
}

// Appends the parts of allocations that lie in a range. Two allocations may be neighbours.
void append(std::vector<Part>& parts, const Range& range, bool writes) {
  for (uintptr_t at = range.begin; at < range.end;) {
    Memory* memory = memory_of(reinterpret_cast<const void*>(at));
    if (memory == nullptr) {
      ++at; // in a gap that was filled up
      continue;
    }
    const auto begin = reinterpret_cast<uintptr_t>(memory->begin);
    const uintptr_t end = std::min(range.end, begin + memory->bytes);
    parts.push_back({memory, at - begin, end - begin, writes, ""});
    at = end;
  }
}

} // namespace

void Touched::forget() {
  pages_.clear();
  own_.clear();
  cache_.fill({});
}

void Touched::add_own(const void* begin, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(begin);
  own_.emplace_back(at, at + bytes);
}

bool Touched::own(uintptr_t address) const {
  for (const auto& [begin, end] : own_) {
    if (begin <= address && address < end) return true;
  }
  return false;
}

const char* Touched::touch(const void* address, size_t bytes, bool writes) {
  auto at = reinterpret_cast<uintptr_t>(address);
  for (const uintptr_t end = at + bytes; at < end;) {
    const uintptr_t number = at / kPage;
    const uintptr_t last = std::min(end, (number + 1) * kPage);
    // Stacks are as far apart as a power of two: the number alone would put all of them in one place.
    Cached& cached = cache_[(number ^ number >> 6) % cache_.size()];
    if (cached.number != number) {
      // A page may be the kernel's own in one half only: those are asked for each time.
      if (own(at)) {
        if (own(number * kPage) && own(number * kPage + kPage - 1)) cached = {number, nullptr};
        at = last;
        continue;
      }
      Page* page = page_of(at);
      if (page == nullptr) {
        problem_ = std::string("it ") + (writes ? "writes to" : "reads") + " the address " + hex(at) +
                   ", which is in no memory of CUDA's: was it freed, or is it the host's?";
        return problem_.c_str();
      }
      cached = {number, page};
    }
    if (cached.page != nullptr) {
      auto& bits = writes ? cached.page->written : cached.page->read;
      for (; at < last; ++at) bits.set(at % kPage);
    }
    at = last;
  }
  return nullptr;
}

Touched::Page* Touched::page_of(uintptr_t address) {
  if (memory_of(reinterpret_cast<const void*>(address)) == nullptr) return nullptr;
  auto& page = pages_[address / kPage];
  if (!page) page = std::make_unique<Page>();
  return page.get();
}

std::vector<Part> Touched::parts(size_t most) const {
  std::vector<Part> parts;
  for (const bool writes : {false, true}) {
    std::vector<Range> ranges;
    for (const auto& [number, page] : pages_) {
      const auto& bits = writes ? page->written : page->read;
      if (bits.none()) continue;
      for (size_t i = 0; i < kPage; ++i) {
        if (!bits.test(i)) continue;
        const uintptr_t at = number * kPage + i;
        if (!ranges.empty() && ranges.back().end == at) ++ranges.back().end;
        else ranges.push_back({at, at + 1});
      }
    }
    join(ranges, most / 2);
    for (const Range& range : ranges) append(parts, range, writes);
  }
  return parts;
}

} // namespace standin
