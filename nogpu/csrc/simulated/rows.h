// A kernel that reads the memory of peers.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace simulated {

// One launch on the current stream of the targets' device: each row's target gets the sum of its terms, or a copy of the
// only one. device_module.py describes rows and shifts. Sums of 16-bit floats are added in 32 bits and rounded once.
void launch_rows(const std::string& name, const at::Tensor& rows, const std::vector<std::optional<at::Tensor>>& tensors,
                 const std::vector<int64_t>& shifts);

} // namespace simulated
