// How many launches each simulated device has seen, and how many bytes have been copied from which device to which.
//
// They always count, for the whole process, and never go back: who wants to know about a part of a program takes the
// difference of two readings. Who calls decides what a launch is: on_cpu.cpp, kernels.cpp, memory.cpp.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace simulated::counts {

constexpr c10::DeviceIndex kHost = -1;

// Called when the work is done, so that one that raises is none.
void launched(c10::DeviceIndex device);
// Between different places; within one nothing is counted.
void copied(c10::DeviceIndex from, c10::DeviceIndex to, uint64_t bytes);

struct Counts {
  std::vector<uint64_t> launches; // of every device that there may ever be
  std::vector<std::tuple<c10::DeviceIndex, c10::DeviceIndex, uint64_t>> copied; // from, to, bytes: where any were
};
// Complete as to what is ordered before it on the host, by a join for example.
Counts read();

} // namespace simulated::counts
