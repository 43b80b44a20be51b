// Pairs of a device's storage and the CPU storage that stands for it while an operator runs on the CPU, or the meta
// storage while a meta kernel tells shapes.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

namespace simulated {

// The memory of a storage, as memory of the CPU or of the meta device. Keeps the storage alive.
c10::DataPtr held_by(const c10::Storage& storage, c10::DeviceType type);

// A storage over the memory of a device's storage, of the CPU or of the meta device. Keeps that memory alive. An operator
// changes this storage only, so the change can be seen by comparing the two.
c10::Storage storage_over(const c10::Storage& device, c10::DeviceType type);

// The pairs of one call.
class Storages {
 public:
  // CPU storages or meta storages stand for those of the device.
  explicit Storages(c10::DeviceType type) : type_(type) {}
  c10::Storage standing_for(const c10::Storage& device);
  // Null for memory that the operator has allocated.
  const c10::Storage* on_device(const c10::Storage& standing) const;
  void add(const c10::Storage& standing, c10::Storage device);
  // Both storages have new memory now.
  void have_moved(const c10::Storage& standing);

 private:
  struct Pair {
    c10::Storage standing; // held, so that none that the operator makes gets the same address
    c10::Storage device;
    void* data; // the memory of both; null for a meta storage that the operator has made
  };

  const c10::DeviceType type_;
  c10::SmallVector<Pair, 6> pairs_;
};

} // namespace simulated
