// Allocations: memory of the devices with its limits, pinned and registered memory of the host, and to whom an address
// belongs.
#include <map>
#include <shared_mutex>

#include "state.h"

namespace standin {

namespace {

using Kind = Allocation::Kind;

std::shared_mutex lock;
std::map<const char*, std::unique_ptr<Allocation>>& table = *new std::map<const char*, std::unique_ptr<Allocation>>;

Allocation* find(const void* address) {
  const auto next = table.upper_bound(static_cast<const char*>(address));
  if (next == table.begin()) {
    return nullptr;
  }
  auto* allocation = std::prev(next)->second.get();
  return static_cast<const char*>(address) < allocation->begin + allocation->bytes ? allocation : nullptr;
}

Allocation& add(char* begin, size_t bytes, Kind kind, int owner, unsigned flags) {
  auto made = std::make_unique<Allocation>();
  auto& allocation = *made;
  allocation.begin = begin;
  allocation.bytes = bytes;
  allocation.device = kind == Kind::kDevice ? owner : -1;
  allocation.kind = kind;
  allocation.owner = owner;
  allocation.flags = flags;
  {
    const std::lock_guard<std::shared_mutex> guard(lock);
    table[begin] = std::move(made);
  }
  if (auto* told = watcher()) {
    told->allocated(allocation);
  }
  return allocation;
}

// The allocation that begins there. It stays known to nobody but the caller.
std::unique_ptr<Allocation> take(const void* address, Kind kind) {
  const std::lock_guard<std::shared_mutex> guard(lock);
  const auto found = table.find(static_cast<const char*>(address));
  if (found == table.end() || found->second->kind != kind) {
    return nullptr;
  }
  auto result = std::move(found->second);
  table.erase(found);
  return result;
}

bool overlaps(const char* begin, size_t bytes) {
  const std::shared_lock<std::shared_mutex> guard(lock);
  const auto next = table.lower_bound(begin);
  return find(begin) != nullptr || (next != table.end() && next->first < begin + bytes);
}

// The device takes memory in pieces of 512 bytes.
size_t taken(size_t bytes) {
  return (bytes + 511) / 512 * 512;
}

bool fits(Device& device, size_t bytes) {
  const auto capacity = capacity_of(device.index);
  auto used = device.used.load();
  do {
    if (bytes > capacity || used > capacity - bytes) {
      return false;
    }
  } while (!device.used.compare_exchange_weak(used, used + bytes));
  return true;
}

void remove(std::unique_ptr<Allocation> allocation) {
  if (auto* told = watcher()) {
    told->freed(*allocation);
  }
  if (allocation->kind != Kind::kRegistered) {
    give_back_pages(allocation->begin, allocation->bytes);
  }
  if (allocation->kind == Kind::kDevice) {
    device_at(allocation->owner).used -= taken(allocation->bytes);
  }
}

// The host waits for the memory's device first, as CUDA does. It does not wait for other devices, which lose the memory
// before that wait: the watcher is asked before, also where the device itself waits for them.
cudaError_t free_after_wait(void* address, Kind kind, const char* call) {
  context_here();
  if (address == nullptr) {
    return cudaSuccess;
  }
  auto removed = take(address, kind);
  if (removed == nullptr) {
    return cudaErrorInvalidValue;
  }
  auto* told = watcher();
  if (told != nullptr && kind == Kind::kDevice) {
    told->freeing(*removed);
  }
  wait_for_device(removed->owner, call);
  remove(std::move(removed));
  return cudaSuccess;
}

} // namespace

cudaError_t allocate(void** address, size_t bytes) {
  auto& device = context_here();
  *address = nullptr;
  if (bytes == 0) {
    return cudaSuccess;
  }
  if (!fits(device, taken(bytes))) {
    return cudaErrorMemoryAllocation;
  }
  auto* begin = take_pages(bytes);
  if (begin == nullptr) {
    device.used -= taken(bytes);
    return cudaErrorMemoryAllocation;
  }
  *address = add(begin, bytes, Kind::kDevice, device.index, 0).begin;
  return cudaSuccess;
}

cudaError_t release(void* address, const char* call) {
  return free_after_wait(address, Kind::kDevice, call);
}

cudaError_t allocate_host(void** address, size_t bytes, unsigned flags) {
  const auto owner = context_here().index;
  *address = nullptr;
  if (bytes == 0) {
    return cudaSuccess;
  }
  auto* begin = take_pages(bytes);
  if (begin == nullptr) {
    return cudaErrorMemoryAllocation;
  }
  *address = add(begin, bytes, Kind::kPinned, owner, flags).begin;
  return cudaSuccess;
}

cudaError_t release_host(void* address, const char* call) {
  return free_after_wait(address, Kind::kPinned, call);
}

Allocation* allocation_of(const void* address) {
  if (in_child()) { // whose CUDA memory nobody can use, and where the lock may never be released
    return nullptr;
  }
  const std::shared_lock<std::shared_mutex> guard(lock);
  return find(address);
}

Memory* memory_of(const void* address) {
  return allocation_of(address);
}

Part part_of(const void* address, size_t bytes, bool writes, const char* argument) {
  Part part;
  part.writes = writes;
  part.argument = argument;
  part.memory = bytes == 0 ? nullptr : memory_of(address);
  if (part.memory != nullptr) {
    part.begin = static_cast<size_t>(static_cast<const char*>(address) - part.memory->begin);
    part.end = part.begin + bytes;
    if (bytes > part.memory->bytes - part.begin) {
      throw std::invalid_argument(std::string("'") + argument + "' has " + std::to_string(bytes) + " bytes, which is " +
                                  std::to_string(part.end - part.memory->bytes) +
                                  " more than there are up to the end of its allocation");
    }
  }
  return part;
}

cudaError_t register_host(void* address, size_t bytes, unsigned flags) {
  const auto owner = context_here().index;
  if (address == nullptr || bytes == 0) {
    return cudaErrorInvalidValue;
  }
  auto* begin = static_cast<char*>(address);
  if (overlaps(begin, bytes)) {
    return cudaErrorHostMemoryAlreadyRegistered;
  }
  add(begin, bytes, Kind::kRegistered, owner, flags);
  return cudaSuccess;
}

cudaError_t unregister_host(void* address) {
  context_here();
  auto removed = take(address, Kind::kRegistered);
  if (removed == nullptr) {
    return cudaErrorHostMemoryNotRegistered;
  }
  remove(std::move(removed));
  return cudaSuccess;
}

void memory_info(size_t* free, size_t* total) {
  auto& device = context_here();
  *total = capacity_of(device.index);
  *free = *total - std::min<size_t>(*total, device.used);
}

} // namespace standin
