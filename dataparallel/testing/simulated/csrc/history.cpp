#include <algorithm>
#include <utility>

#include "clocks.h"

namespace simulated {

uint64_t Clock::tick(StreamNumber stream) {
  if (stream >= ticks_.size()) {
    ticks_.resize(stream + 1, 0);
  }
  return ++ticks_[stream];
}

void Clock::join(const Clock& other) {
  if (other.ticks_.size() > ticks_.size()) {
    ticks_.resize(other.ticks_.size(), 0);
  }
  for (size_t i = 0; i < other.ticks_.size(); ++i) {
    ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }
}

void History::start_with(size_t bytes, Access write) {
  segments_.clear();
  segments_.push_back({{0, bytes}, std::move(write), {}});
}

// The index of the first segment that begins at or after `position`, after cutting the one that contains it.
size_t History::cut_at(size_t position) {
  auto found = std::lower_bound(
      segments_.begin(), segments_.end(), position, [](const Segment& s, size_t p) { return s.span.end <= p; });
  if (found != segments_.end() && found->span.begin < position) {
    Segment front = *found;
    front.span.end = position;
    found->span.begin = position;
    found = segments_.insert(found, std::move(front)) + 1;
  }
  return static_cast<size_t>(found - segments_.begin());
}

History::Segment* History::within(Span span, size_t& count) {
  size_t first = cut_at(span.begin);
  const size_t last = cut_at(span.end);
  // Fill what has never been accessed, so that the segments cover the span.
  size_t position = span.begin, i = first, end = last;
  while (position < span.end) {
    if (i < end && segments_[i].span.begin == position) {
      position = segments_[i++].span.end;
      continue;
    }
    const size_t until = i < end ? segments_[i].span.begin : span.end;
    segments_.insert(segments_.begin() + static_cast<ptrdiff_t>(i), Segment{{position, until}, {}, {}});
    ++i, ++end;
    position = until;
  }
  count = end - first;
  return segments_.data() + first;
}

} // namespace simulated
