// Operators over lists of tensors that accelerators have fused kernels for, where torch's default is a loop.
#pragma once

namespace simulated {

void register_list_operators();

} // namespace simulated
