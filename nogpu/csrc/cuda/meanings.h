// Operators that CUDA has and the CPU has not, by what they mean: functions on tensors of the CPU. Each call of one is a
// launch, whose reads and writes the clocks know from its schema. operators.cpp registers them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>

#include "register.h"

namespace simulated::meanings {

// The operator `aten::name`, as in "batch_norm_elemt.out", is computed by the function.
template <class Function>
void add(torch::Library& library, const std::string& name, Function* function) {
  const auto dot = name.find('.');
  const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::" + name.substr(0, dot), overload});
  if (op) { // another version of torch may have no such operator
    library.impl(name.c_str(), on_cpu(*op, c10::KernelFunction::makeFromUnboxedRuntimeFunction(function)));
  }
}

void add_batch_norm(torch::Library& library);
void add_attention(torch::Library& library);
void add_packed_attention(torch::Library& library);
void add_products(torch::Library& library);
void add_layers_of_cudnn(torch::Library& library);

// Recurrent layers are composed of operators: see rnn.cpp.
void replace_rnn();

} // namespace simulated::meanings
