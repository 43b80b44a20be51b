// Counts the launches on each simulated device, and the bytes that are copied between devices and the host.
//
// The counts are those of the whole process, and only grow. The difference of two readings is the count of what ran in
// between. The callers decide what a launch is: on_cpu.cpp, kernels.cpp and memory.cpp.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace simulated::counts {

constexpr c10::DeviceIndex kHost = -1;

// Called when the work is done, so that an operator that raises does not count.
void launched(c10::DeviceIndex device);
// A copy within one place does not count.
void copied(c10::DeviceIndex from, c10::DeviceIndex to, uint64_t bytes);

struct Counts {
  std::vector<uint64_t> launches; // by device, for all kCeiling
  std::vector<std::tuple<c10::DeviceIndex, c10::DeviceIndex, uint64_t>> copied; // from, to, bytes: only pairs with any
};
// Includes everything that the host orders before this call, for example by joining a thread.
Counts read();

} // namespace simulated::counts
