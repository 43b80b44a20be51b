// Operators that are captured: they are done at each launch of the graph. Their arguments are kept by address, as a graph
// of CUDA keeps them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <utility>
#include <vector>

#include "operator_plan.h"
#include "quietly.h"

namespace simulated {

// A CPU tensor at the address of a tensor of a device, which keeps nothing alive.
at::Tensor by_address(const at::Tensor& tensor);

// True if nothing is known yet that keeps an operator with these arguments from being done later.
bool can_be_later(const OperatorPlan& plan, const c10::IValue* arguments);

// True for what a meta kernel has made. What it has made on the CPU would not go to the device.
bool are_on_meta(c10::ArrayRef<c10::IValue> values);

// The operator, to be called in its turn, by any thread, and once for each launch if it was captured. Throws std::runtime_error with the operator's name.
class Later {
 public:
  // The results are those that the caller of the operator gets: tensors of the device with memory, without values.
  Later(const OperatorPlan& plan, c10::Device device, c10::ArrayRef<c10::IValue> arguments,
        c10::ArrayRef<c10::IValue> results);
  void operator()();

 private:
  const OperatorPlan* plan_; // the registered kernels' own: they stay
  torch::jit::Stack arguments_;
  // For arguments that are generators, by their number.
  std::vector<std::pair<size_t, std::function<at::Generator()>>> draws_;
  std::vector<at::Tensor> results_; // by address
};

// What a thread has switched on, such as a mode of Python's or a profiler, is not meant for work that another has launched.
class Alone {
 public:
  Alone();

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  at::DisableRecordFunctionGuard observers_;
  Quietly warnings_; // the meta kernel has warned
};

} // namespace simulated
