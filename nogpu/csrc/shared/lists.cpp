#include "lists.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>

#include "front.h"
#include "on_cpu.h"
#include "register.h"

namespace simulated {
namespace {

// Finds out if the tensors of a call are on one simulated device. CPU tensors without dimensions may be among them.
class OneDevice {
 public:
  bool holds(c10::ArrayRef<c10::IValue> values) {
    return std::all_of(values.begin(), values.end(), [this](const c10::IValue& value) {
      if (value.isTensor()) {
        return joins(value.toTensor());
      }
      return !value.isTensorList() || holds(value.toListRef());
    });
  }

 private:
  bool joins(const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) {
      return true;
    }
    if (!device_) {
      device_ = tensor.device();
    }
    return tensor.device().type() == kDevice && tensor.device() == *device_;
  }

  std::optional<c10::Device> device_;
};

// As with torch's fused kernels, a list on one device is one launch, and any other list is a loop.
class InOneLaunch final : public c10::OperatorKernel {
 public:
  explicit InOneLaunch(c10::OperatorHandle op) : plan_(std::move(op)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto count = plan_.arguments;
    const c10::ArrayRef<c10::IValue> arguments(stack->data() + (stack->size() - count), count);
    if (OneDevice().holds(arguments)) {
      note_writes(arguments);
      run_on_cpu(plan_, stack, op.operator_name());
    } else {
      // No kernels are registered for PrivateUse2, so torch's default runs: a loop over the tensors.
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse2), stack);
    }
  }

 private:
  // No kernel of autograd's does it for lists. A loop does it for each tensor, and so do torch's fused kernels.
  void note_writes(c10::ArrayRef<c10::IValue> arguments) const {
    for (const auto& place : plan_.places) {
      if (place.says_it_writes && arguments[place.index].isTensorList()) {
        for (const at::Tensor& tensor : arguments[place.index].toTensorVector()) {
          tensor.unsafeGetTensorImpl()->bump_version();
        }
      }
    }
  }

  const OperatorPlan plan_;
};

} // namespace

bool is_a_list_operator(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.name.rfind("aten::_foreach_", 0) == 0 ||
      (name.name == "aten::split_with_sizes_copy" && name.overload_name == "out");
}

void register_list_operators() {
  static torch::Library library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  const Quietly quietly;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = *dispatcher.findOp(name);
    if (!is_a_list_operator(op)) {
      continue;
    }
    if (kDevice == c10::kCUDA || !op.hasKernelForDispatchKey(kKey)) {
      library.impl(full_name(name).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<InOneLaunch>(op)));
    }
  }
}

} // namespace simulated
