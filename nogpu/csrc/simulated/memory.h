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
  c10::DataPtr owner; // frees the memory
};

namespace memory {

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();

// Takes over memory that an operator has allocated on the CPU, as memory of `device`. For a meta storage it is memory of
// the same size. Throws c10::OutOfMemoryError.
c10::DataPtr adopt(const c10::Storage& made, c10::Device device);
// The same for a storage with memory that nobody else refers to: the storage itself becomes one of `device`.
void convert(c10::StorageImpl& made, c10::Device device);

// The block behind a device tensor's memory. Null for empty tensors and for memory that was allocated elsewhere.
Block* block_of(const c10::DataPtr& data);
// The pinned block that contains `pointer`, or null.
Block* pinned_block_of(const void* pointer);

MemoryStats stats(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void set_capacity(c10::DeviceIndex device, std::optional<size_t> bytes);

// Gives the storage new memory of this size, and copies as much of the content as fits.
void move(c10::StorageImpl& storage, size_t bytes);
// The same, but only if the storage is smaller.
void grow(c10::StorageImpl& storage, size_t bytes);

} // namespace memory
} // namespace simulated
