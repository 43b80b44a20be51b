#include "register.h"

#include <memory>
#include <vector>

#include "on_cpu.h"

namespace simulated {
namespace {

class OnCpu final : public c10::OperatorKernel {
 public:
  explicit OnCpu(OperatorPlan plan) : plan_(std::move(plan)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    run_on_cpu(plan_, stack, op.operator_name());
  }

 private:
  const OperatorPlan plan_;
};


} // namespace

torch::CppFunction on_cpu(c10::OperatorHandle op) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<OnCpu>(OperatorPlan(std::move(op))));
}

torch::CppFunction on_cpu(c10::OperatorHandle op, c10::KernelFunction function) {
  return torch::CppFunction::makeFromBoxedFunctor(
      std::make_unique<OnCpu>(OperatorPlan(std::move(op), std::move(function))));
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void register_what_the_cpu_has(c10::DispatchKey cpu, c10::DispatchKey key,
                               bool (*wanted)(const c10::OperatorHandle&)) {
  static std::vector<std::unique_ptr<torch::Library>> libraries;
  libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(cpu)) {
    const auto op = *dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && wanted(op)) {
      libraries.back()->impl(full_name(name).c_str(), on_cpu(op));
    }
  }
}

} // namespace simulated
