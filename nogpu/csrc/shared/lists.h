// Registers the operators over lists of tensors that have fused kernels on other accelerators. torch's default for them
// is a loop.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace simulated {

bool is_a_list_operator(const c10::OperatorHandle& op);

void register_list_operators();

} // namespace simulated
