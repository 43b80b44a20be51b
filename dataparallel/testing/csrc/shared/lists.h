// Registers the operators over lists of tensors that have fused kernels on other accelerators. torch's default for them
// is a loop.
#pragma once

namespace simulated {

void register_list_operators();

} // namespace simulated
