// Operators of libraries that are loaded after the start.
#pragma once

#include <ATen/core/operator_name.h>

#include <vector>

namespace simulated {

// The operators that have a kernel for CUDA now.
struct Operators {
  std::vector<c10::OperatorName> names;
};

Operators operators_now();

// Operators that have got a kernel for CUDA since are computed as on the CPU, if the CPU can compute them.
void compute_those_since(const Operators& before);

} // namespace simulated
