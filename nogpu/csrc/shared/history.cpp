#include "history.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace simulated {

uint64_t Clock::tick(StreamNumber stream) {
  if (stream >= ticks_.size()) {
    ticks_.resize(stream + 1, 0);
  }
  return ++ticks_[stream];
}

void Clock::raise(StreamNumber stream, uint64_t tick) {
  if (stream >= ticks_.size()) {
    ticks_.resize(stream + 1, 0);
  }
  ticks_[stream] = std::max(ticks_[stream], tick);
}

void Clock::join(const Clock& other) {
  if (other.ticks_.size() > ticks_.size()) {
    ticks_.resize(other.ticks_.size(), 0);
  }
  for (size_t i = 0; i < other.ticks_.size(); ++i) {
    ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }
}

bool Clock::covers(const Clock& other) const {
  for (size_t i = 0; i < other.ticks_.size(); ++i) {
    if (other.ticks_[i] > (*this)[static_cast<StreamNumber>(i)]) {
      return false;
    }
  }
  return true;
}

std::vector<Span> Runs::spans() const {
  std::vector<Span> result{{begin, begin + length}};
  for (const auto& [distance, count] : steps) {
    const auto inner = result.size();
    for (size_t i = 1; i < count; ++i) {
      for (size_t j = 0; j < inner; ++j) {
        result.push_back({result[j].begin + i * distance, result[j].end + i * distance});
      }
    }
  }
  return result;
}

void History::start_with(size_t bytes, Access write) {
  segments_.clear();
  segments_.emplace(0, Segment{bytes, std::move(write), {}});
}

// Splits the segment that contains `position`, and returns the first one that begins there or later.
History::Segments::iterator History::cut_at(size_t position) {
  auto next = segments_.lower_bound(position);
  if (next != segments_.begin()) {
    auto& before = *std::prev(next);
    if (before.second.end > position) {
      next = segments_.emplace_hint(next, position, before.second);
      before.second.end = position;
    }
  }
  return next;
}

std::pair<History::Segments::iterator, History::Segments::iterator> History::within(Span span) {
  const auto first = cut_at(span.begin);
  const auto last = cut_at(span.end);
  auto position = span.begin;
  for (auto segment = first; position < span.end;) {
    if (segment != last && segment->first == position) {
      position = (segment++)->second.end;
    } else {
      const auto until = segment != last ? segment->first : span.end;
      segments_.emplace_hint(segment, position, Segment{until, {}, {}});
      position = until;
    }
  }
  return {segments_.lower_bound(span.begin), last};
}

void History::write(Span span, Access access) {
  const auto [first, last] = within(span);
  segments_.erase(first, last);
  segments_.emplace(span.begin, Segment{span.end, std::move(access), {}});
}

} // namespace simulated
