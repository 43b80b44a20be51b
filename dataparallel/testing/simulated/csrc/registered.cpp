// Registers the CPU's operators for simulated devices, except those that kernels.cpp implements.
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <torch/library.h>

#include "on_cpu.h"

namespace simulated {
namespace {

using at::Tensor;

class OnCpu final : public c10::OperatorKernel {
 public:
  explicit OnCpu(c10::OperatorHandle op) : plan_(std::move(op)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    run_on_cpu(plan_, stack, op.operator_name());
  }

 private:
  const OperatorPlan plan_;
};

torch::CppFunction on_cpu(c10::OperatorHandle op) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<OnCpu>(std::move(op)));
}

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

class Silence final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Registers every operator that has a kernel of the CPU, one by one. A fallback alone would not do: torch prefers its
// default implementations to a fallback, and these take detours that the CPU's kernels do not.
void register_what_the_cpu_has(c10::DispatchKey cpu, c10::DispatchKey simulated) {
  static std::vector<std::unique_ptr<torch::Library>> libraries;
  libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", simulated, __FILE__, __LINE__));
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(cpu)) {
    const auto op = *dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && !op.hasKernelForDispatchKey(simulated)) {
      libraries.back()->impl(full_name(name).c_str(), on_cpu(op));
    }
  }
}

// Replaces the kernels that torch.distributed has for this backend. They need a process group of the backend; with the
// CPU's kernels gloo works on the device's memory.
void register_distributed() {
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  Silence silence; // torch warns of overridden kernels, and they are meant to be
  const c10::WarningUtils::WarningHandlerGuard silent(&silence);
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
  register_what_the_cpu_has(Key::CPU, Key::PrivateUse1);
  register_what_the_cpu_has(Key::SparseCPU, Key::SparsePrivateUse1);
  register_what_the_cpu_has(Key::SparseCsrCPU, Key::SparseCsrPrivateUse1);
  register_what_the_cpu_has(Key::NestedTensorCPU, Key::NestedTensorPrivateUse1);
  register_distributed();
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&attention_kernel);
}

} // namespace simulated
