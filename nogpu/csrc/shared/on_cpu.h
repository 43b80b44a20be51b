// Runs the operators of simulated devices on the CPU, in the device's own memory. With simulate(compute=False) they do
// not run: meta kernels tell the shapes of the results.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/TensorImpl.h>

#include "below_autograd.h"
#include "clocks.h"
#include "operator_plan.h"

namespace simulated {

// Pops the operator's arguments from the stack, runs its CPU kernel on the same memory, and pushes the results as
// tensors of the device. The device is that of the tensors, or of the device argument if there are no tensors. Throws
// c10::Error for tensors of two devices, and for a CPU tensor with dimensions beside a device tensor. Error messages
// call the operator `name`.
void run_on_cpu(const OperatorPlan& plan, torch::jit::Stack* stack, const c10::OperatorName& name);

// A CPU tensor over the memory of a device tensor. Keeps that memory alive.
at::Tensor cpu_alias(const at::Tensor& tensor);
// A meta tensor with the shape of any strided tensor. Keeps its memory alive.
at::Tensor meta_alias(const at::Tensor& tensor);

// Adds the memory of a tensor, for the clocks. Adds nothing for memory that they do not know.
void add_touch(c10::SmallVectorImpl<Touch>& touches, const at::Tensor& tensor, bool write, const char* argument);

// Registers the operators that exist when the extension is loaded: the CPU's of every layout, and torch.distributed's.
void register_operators();

} // namespace simulated
