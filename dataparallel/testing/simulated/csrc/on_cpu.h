// Running an operator of a simulated device on the CPU, in the device's own memory.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "clocks.h"
#include "operator_plan.h"

namespace simulated {

// Pops the arguments of the operator from the stack, runs its CPU kernel on the same memory, pushes the results as tensors of
// the device. The device is the one of the tensors; without tensors that of the device argument. Refuses two devices
// in one call, and a CPU tensor of one or more dimensions beside a device tensor. `name` is what messages call it.
void run_on_cpu(const OperatorPlan& plan, torch::jit::Stack* stack, const c10::OperatorName& name);

// What must not happen again below an operator of a device: autograd and autocast have had their turn.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

// A CPU tensor over the memory of a device tensor, Keeps that memory alive.
at::Tensor cpu_alias(const at::Tensor& tensor);

// The memory that a tensor touches, for the clocks: nothing for memory that they do not know.
void add_touch(c10::SmallVectorImpl<Touch>& touches, const at::Tensor& tensor, bool write, const char* argument);

// The operators that are found when the extension is loaded: for sparse tensors, and torch.distributed's.
void register_operators();

} // namespace simulated
