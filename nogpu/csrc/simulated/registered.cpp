// Registers the CPU's operators for simulated devices, except those that kernels.cpp implements.
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <torch/library.h>

#include "front.h"
#include "on_cpu.h"
#include "register.h"

namespace simulated {
namespace {

using at::Tensor;

// For operators that are defined after the extension has been loaded. They may be removed and defined anew, so no plan
// is kept.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_cpu(OperatorPlan(op), stack, op.operator_name());
}

// torch asks each backend which kernel of attention to use. The answer is the CPU's.
int64_t attention_kernel(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  return at::_fused_sdp_choice(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
}

template <c10::DispatchKey key>
bool has_none(const c10::OperatorHandle& op) {
  return !op.hasKernelForDispatchKey(key);
}

// Replaces the kernels that torch.distributed has for this backend. They need a process group of the backend; with the
// CPU's kernels gloo works on the device's memory.
void register_distributed() {
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  const Quietly quietly;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("c10d::", 0) == 0) {
      library.impl(full_name(name).c_str(), on_cpu(*dispatcher.findOp(name)));
    }
  }
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

void register_operators() {
  using Key = c10::DispatchKey;
  register_composed();
  register_what_the_cpu_has(Key::CPU, kKey, has_none<kKey>);
  register_what_the_cpu_has(Key::SparseCPU, kSparseKey, has_none<kSparseKey>);
  register_what_the_cpu_has(Key::SparseCsrCPU, kSparseCsrKey, has_none<kSparseCsrKey>);
  register_what_the_cpu_has(Key::NestedTensorCPU, kNestedKey, has_none<kNestedKey>);
  register_distributed();
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&attention_kernel);
}

} // namespace simulated
