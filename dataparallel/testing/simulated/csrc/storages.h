// Pairs of a device's storage and the CPU storage that stands for it while an operator runs on the CPU.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

namespace simulated {

// A CPU storage over the memory of a device's storage. Keeps that memory alive. An operator changes this storage only,
// so the change can be seen by comparing the two.
c10::Storage cpu_storage_over(const c10::Storage& device);

// The pairs of one call.
class Storages {
 public:
  c10::Storage on_cpu(const c10::Storage& device);
  // Null for memory that the operator has allocated.
  const c10::Storage* on_device(const c10::Storage& cpu) const;
  void add(const c10::Storage& cpu, c10::Storage device);
  // Both storages have new memory now.
  void have_moved(const c10::Storage& cpu);

 private:
  struct Pair {
    c10::StorageImpl* cpu;
    c10::Storage device;
    void* data; // the memory of both
  };

  c10::SmallVector<Pair, 6> pairs_;
};

} // namespace simulated
