// Which storage of the CPU stands for which storage of a device, while an operator runs on the CPU.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

namespace simulated {

// A storage of the CPU over the memory of a device's. Keeps that memory alive, and what an operator makes of it can be told
// from what it was.
c10::Storage cpu_storage_over(const c10::Storage& device);

// Those of one call.
class Storages {
 public:
  c10::Storage on_cpu(const c10::Storage& device);
  // Null for memory that the operator has made.
  const c10::Storage* on_device(const c10::Storage& cpu) const;
  void add(const c10::Storage& cpu, c10::Storage device);
  // Both have other memory now.
  void have_moved(const c10::Storage& cpu);

 private:
  struct Pair {
    c10::StorageImpl* cpu;
    c10::Storage device;
    void* data; // of both
  };

  c10::SmallVector<Pair, 6> pairs_;
};

} // namespace simulated
