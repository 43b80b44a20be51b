// Memory of the simulated devices: host memory that belongs to a device, counted to the byte, with a capacity.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <optional>

#include "account.h"
#include "clocks.h"

namespace simulated {

struct Block : Tracked {
  void* data = nullptr;
  size_t bytes = 0;
  c10::DeviceIndex device = -1; // -1: pinned host memory
  c10::DataPtr owner; // frees the memory
};

namespace memory {

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();

// Takes over what an operator has made on the CPU, as memory of `device`. Throws c10::OutOfMemoryError.
c10::DataPtr adopt(const c10::Storage& made, c10::Device device);
// The same for a storage that nobody else knows, and has memory: it becomes one of `device`.
void convert(c10::StorageImpl& made, c10::Device device);

// The memory of a storage, for the CPU. Keeps the storage alive.
c10::DataPtr held_by(const c10::Storage& storage);

// The block behind a device tensor's memory, or null (empty tensors, memory of somebody else's).
Block* block_of(const c10::DataPtr& data);
// The pinned block that contains `pointer`, or null.
Block* pinned_block_of(const void* pointer);

MemoryStats stats(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void set_capacity(c10::DeviceIndex device, std::optional<size_t> bytes);

// Gives the storage other memory of this size, with as much of the content as fits.
void move(c10::StorageImpl& storage, size_t bytes);
// The same if it is smaller.
void grow(c10::StorageImpl& storage, size_t bytes);

} // namespace memory
} // namespace simulated
