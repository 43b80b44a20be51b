#include "counts.h"

#include <array>
#include <atomic>

#include "ceilings.h"

namespace simulated::counts {
namespace {

constexpr size_t kPlaces = kCeiling + 1; // the first is the host

// A count of independent events. No thread decides by it whether other data is ready, so it needs no memory order.
struct alignas(64) Count {
  std::atomic<uint64_t> value{0};
  void add(uint64_t more) {
    value.fetch_add(more, std::memory_order_relaxed);
  }
  uint64_t now() const {
    return value.load(std::memory_order_relaxed);
  }
};

std::array<Count, kCeiling> launches;
std::array<std::array<Count, kPlaces>, kPlaces> bytes;

size_t place(c10::DeviceIndex device) {
  return static_cast<size_t>(device - kHost);
}

} // namespace

void launched(c10::DeviceIndex device) {
  launches.at(static_cast<size_t>(device)).add(1);
}

void copied(c10::DeviceIndex from, c10::DeviceIndex to, uint64_t count) {
  if (from != to) {
    bytes.at(place(from)).at(place(to)).add(count);
  }
}

Counts read() {
  Counts now;
  for (const auto& count : launches) {
    now.launches.push_back(count.now());
  }
  for (size_t from = 0; from < kPlaces; ++from) {
    for (size_t to = 0; to < kPlaces; ++to) {
      if (const auto count = bytes[from][to].now()) {
        const auto device = [](size_t place) { return static_cast<c10::DeviceIndex>(static_cast<int>(place) + kHost); };
        now.copied.emplace_back(device(from), device(to), count);
      }
    }
  }
  return now;
}

} // namespace simulated::counts
