// simulate(compute=False): kernels are skipped, and device memory has addresses but no bytes.
//
// on_cpu.cpp then calls an operator with meta tensors in place of CPU tensors, so that torch's meta kernels tell the
// shapes, dtypes and aliases of the results. What needs values is refused. Counts, clocks and the account of memory do
// not ask this file: they see the same launches and the same bytes either way.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <string>

#include "operator_plan.h"

namespace simulated::skipped {

// False while operators compute, as they do unless the process has asked otherwise.
bool on();
// Called once, before the process has a device.
void skip_kernels();

// Memory for `bytes` bytes that nothing is behind. As with a pointer into a real device's memory, a host that reads or
// writes there ends with a segmentation fault. No address is handed out twice.
c10::DataPtr addresses(size_t bytes);

// A meta tensor with the shape and dtype of a CPU tensor without dimensions.
at::Tensor without_value(const at::Tensor& tensor);

// Pops the operator's arguments and pushes its results, which a meta kernel has made. Throws c10::NotImplementedError
// if torch has none for the operator, or none that can do without values.
void call(const OperatorPlan& plan, torch::jit::Stack* stack, const std::string& name);

// The same where another way is left: returns false if torch has none, or if it refuses the arguments. Then the stack may
// have lost them.
bool answers(const OperatorPlan& plan, torch::jit::Stack* stack);

// True in a thread while a meta kernel runs in it. shapes.py asks.
bool in_kernel();

// Throws c10::NotImplementedError, a RuntimeError in Python, which says that `what` needs values.
[[noreturn]] void refuse(const std::string& what);

} // namespace simulated::skipped
