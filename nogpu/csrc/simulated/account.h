// Counts the bytes in use on a simulated device, and holds its capacity.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>

namespace simulated {

struct MemoryStats {
  size_t allocated = 0;
  size_t peak = 0;
  std::optional<size_t> capacity;
};

namespace memory {

// The bytes of one device. Every operator takes and gives back bytes, on any thread, so the counts are atomic and there
// is no lock. All accesses are sequentially consistent. A reader sees each number as it was at some moment of its call.
class alignas(64) Account {
 public:
  void take(c10::DeviceIndex device, size_t bytes) {
    const size_t most = capacity_;
    size_t before = allocated_;
    do {
      TORCH_CHECK_WITH(
          OutOfMemoryError, before + bytes <= most, "sim out of memory. Tried to allocate ", bytes,
          " bytes. Simulated device ", static_cast<int>(device), " has a capacity of ", most,
          " bytes (torch.sim.set_memory_capacity), of which ", before, " are allocated.");
    } while (!allocated_.compare_exchange_weak(before, before + bytes));
    raise_peak(before + bytes);
  }
  void give_back(size_t bytes) {
    allocated_ -= bytes;
  }
  void set_capacity(std::optional<size_t> bytes) {
    capacity_ = bytes.value_or(kUnlimited);
  }
  // A concurrent take() is either included in allocated_ here, or raises the peak after this.
  void reset_peak() {
    peak_ = 0;
    raise_peak(allocated_);
  }
  MemoryStats stats() const {
    MemoryStats now;
    now.allocated = allocated_;
    now.peak = std::max<size_t>(peak_, now.allocated); // take() raises the peak a moment after the count
    if (const size_t most = capacity_; most != kUnlimited) {
      now.capacity = most;
    }
    return now;
  }

 private:
  static constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

  void raise_peak(size_t to) {
    size_t before = peak_;
    while (before < to && !peak_.compare_exchange_weak(before, to)) {
    }
  }

  std::atomic<size_t> allocated_{0};
  std::atomic<size_t> peak_{0};
  std::atomic<size_t> capacity_{kUnlimited};
};

} // namespace memory
} // namespace simulated
