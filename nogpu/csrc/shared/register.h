// Registers kernels that run operators of the CPU, for a key of the devices.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>

#include "quietly.h"

namespace simulated {

// Runs the operator by its kernel of the CPU.
torch::CppFunction on_cpu(c10::OperatorHandle op);
// Runs the function on tensors of the CPU, for an operator that has no kernel there.
torch::CppFunction on_cpu(c10::OperatorHandle op, c10::KernelFunction function);

std::string full_name(const c10::OperatorName& name);

// Registers the operators of torch that have a kernel for `cpu` and are wanted, one by one. A fallback alone would not
// do: torch prefers its default implementations to a fallback, and these take detours that the CPU's kernels do not.
void register_what_the_cpu_has(c10::DispatchKey cpu, c10::DispatchKey key, bool (*wanted)(const c10::OperatorHandle&));

// Registers what is composed of other operators. Kernels that are there are replaced.
void register_composed();

} // namespace simulated
