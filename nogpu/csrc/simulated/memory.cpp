#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "counts.h"
#include "current.h"
#include "labels.h"
#include "ceilings.h"
#include "process_state.h"
#include "skipped.h"
#include "storages.h"

namespace simulated::memory {
namespace {

constexpr size_t kAlignment = 64;

// The pinned blocks, by the address of their first byte.
struct Pinned {
  std::mutex mutex;
  std::map<const char*, Block*> blocks;
};

Pinned& pinned() {
  return process_state<Pinned>();
}

Account& account(c10::DeviceIndex device) {
  static auto* accounts = new std::array<Account, kCeiling>();
  return accounts->at(static_cast<size_t>(device));
}

c10::DataPtr raw_memory(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK_WITH(
      OutOfMemoryError, posix_memalign(&data, kAlignment, bytes) == 0, "this machine has no ", bytes,
      " bytes left for a simulated device");
  return {data, data, &std::free, c10::Device(c10::kCPU)};
}

c10::DataPtr device_memory(size_t bytes) {
  return skipped::on() ? skipped::addresses(bytes) : raw_memory(bytes);
}

void delete_block(void* context) {
  auto* block = static_cast<Block*>(context);
  clocks::freed(*block, stream_here());
  account(block->device).give_back(block->bytes);
  delete block;
}

void delete_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks.erase(static_cast<const char*>(block->data));
  }
  // CUDA's allocator waits for the copies of pinned memory before it reuses the memory, so the clocks are not told.
  delete block;
}

std::unique_ptr<Block> new_block(c10::DataPtr memory, size_t bytes, c10::Device device) {
  auto block = std::make_unique<Block>();
  block->data = memory.get();
  block->bytes = bytes;
  block->device = device.index();
  block->where = label_of(device.index());
  block->owner = std::move(memory);
  return block;
}

c10::DataPtr hand_out(Block* block) {
  return {block->data, block, &delete_block, c10::Device(c10::kPrivateUse1, block->device)};
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    if (bytes == 0) {
      return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    }
    account(device.index()).take(device.index(), bytes);
    c10::DataPtr memory;
    try {
      memory = device_memory(bytes);
    } catch (...) {
      account(device.index()).give_back(bytes);
      throw;
    }
    make_context(device.index());
    auto block = new_block(std::move(memory), bytes, device);
    clocks::allocated(*block, bytes, current_stream(device));
    return hand_out(block.release());
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // the context of a DataPtr is its Block, not its address
  }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    if (!skipped::on()) {
      std::memcpy(destination, source, bytes);
    }
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    clocks::allocators_let_go();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (auto* block = block_of(data)) {
      clocks::used_on(*block, stream);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto now = stats(device);
    c10::CachingDeviceAllocator::DeviceStats result;
    for (auto* bytes : {&result.allocated_bytes, &result.active_bytes, &result.reserved_bytes, &result.requested_bytes}) {
      auto& all = (*bytes)[0];
      all.current = static_cast<int64_t>(now.allocated);
      all.peak = static_cast<int64_t>(now.peak);
    }
    return result;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    reset_peak(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto now = stats(device);
    TORCH_CHECK(now.capacity, "simulated device ", static_cast<int>(device),
                " has no capacity: set one with torch.sim.set_memory_capacity");
    return {*now.capacity - std::min(*now.capacity, now.allocated), *now.capacity};
  }
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
    }
    auto block = std::make_unique<Block>();
    block->owner = raw_memory(bytes);
    block->data = block->owner.get();
    block->bytes = bytes;
    block->where = "pinned host memory";
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks.emplace(static_cast<const char*>(block->data), block.get());
    auto* raw = block.release();
    return {raw->data, raw, &delete_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
};

} // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* the = new DeviceMemory();
  return the;
}

c10::Allocator* pinned_allocator() {
  static auto* the = new PinnedMemory();
  return the;
}

c10::DataPtr adopt(const c10::Storage& made, c10::Device device) {
  if (made.nbytes() == 0) {
    return {nullptr, nullptr, &c10::detail::deleteNothing, device};
  }
  made.mutable_data(); // copies the memory if the storage is copy-on-write
  account(device.index()).take(device.index(), made.nbytes());
  auto memory = made.device().is_meta() ? skipped::addresses(made.nbytes()) : held_by(made, c10::kCPU);
  return hand_out(new_block(std::move(memory), made.nbytes(), device).release());
}

void convert(c10::StorageImpl& made, c10::Device device) {
  made.mutable_data(); // as above
  account(device.index()).take(device.index(), made.nbytes());
  auto memory = made.set_data_ptr({nullptr, nullptr, &c10::detail::deleteNothing, device});
  made.set_data_ptr_noswap(hand_out(new_block(std::move(memory), made.nbytes(), device).release()));
  made.set_allocator(device_allocator());
}

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

Block* pinned_block_of(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto& blocks = pinned().blocks;
  auto found = blocks.upper_bound(static_cast<const char*>(pointer));
  if (found == blocks.begin()) {
    return nullptr;
  }
  auto* block = std::prev(found)->second;
  return static_cast<const char*>(pointer) < static_cast<const char*>(block->data) + block->bytes ? block : nullptr;
}

MemoryStats stats(c10::DeviceIndex device) {
  return account(device).stats();
}

void reset_peak(c10::DeviceIndex device) {
  account(device).reset_peak();
}

void set_capacity(c10::DeviceIndex device, std::optional<size_t> bytes) {
  account(device).set_capacity(bytes);
}

void move(c10::StorageImpl& storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  const OnDevice on(storage.device());
  auto memory = device_allocator()->allocate(bytes);
  if (const auto kept = std::min(bytes, storage.nbytes())) {
    Work work;
    clocks::Ticket ticket;
    if (clocks::enabled() || work.is_recorded) {
      c10::SmallVector<Touch, 2> touches;
      if (auto* from = block_of(storage.data_ptr())) {
        touches.push_back({from, {{0, kept}}, false, "storage", nullptr});
      }
      touches.push_back({block_of(memory), {{0, kept}}, true, "storage", nullptr});
      ticket = clocks::launch(current_stream(storage.device()), "resize", touches);
    }
    device_allocator()->copy_data(memory.get(), storage.data(), kept);
    counts::launched(storage.device().index());
    work.resized("resize", kept);
    clocks::done(ticket, std::move(work));
  }
  storage.set_data_ptr(std::move(memory));
  storage.set_nbytes(bytes);
}

void grow(c10::StorageImpl& storage, size_t bytes) {
  if (storage.nbytes() < bytes) {
    move(storage, bytes);
  }
}

} // namespace simulated::memory
