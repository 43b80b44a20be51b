// What the devices say of themselves, as numbers: those of an A100 where the machine does not say otherwise.
// devices.cpp, the driver and NVML ask.
#pragma once

#include <string>

#include "state.h"

namespace standin {

constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;

// All but the name, the uuid and the memory. The structure is cleared before.
void fill_properties(cudaDeviceProp& properties, int physical);
// Whether there is such an attribute. What the stand-in does not have is 0.
bool attribute_of(int physical, int attribute, int* value);
std::string pci_bus_id(int physical); // "0000:01:00.0"

} // namespace standin
