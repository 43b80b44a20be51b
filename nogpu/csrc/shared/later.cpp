#include "later.h"

#include <ATen/core/List.h>

#include <algorithm>
#include <functional>
#include <unordered_map>

#include "below_autograd.h"
#include "front.h"
#include "layouts.h"

namespace simulated {
namespace {

using at::Tensor;
using Draws = std::vector<std::pair<size_t, std::function<at::Generator()>>>;

c10::Storage storage_by_address(const c10::StorageImpl& storage) {
  c10::DataPtr data(const_cast<void*>(storage.data()), c10::Device(c10::kCPU));
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data),
                                               nullptr, /*resizable=*/false);
}

// Calls the function with each tensor of a value.
void each_tensor(const c10::IValue& value, const std::function<void(const Tensor&)>& see) {
  if (value.isTensor()) {
    see(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      each_tensor(element, see);
    }
  }
}

bool is_known(const Tensor& tensor) {
  if (!tensor.defined()) {
    return true;
  }
  const bool is_of_device = tensor.device().type() == kDevice;
  return (is_of_device || tensor.is_cpu()) && layouts::is_strided(tensor) && !tensor.is_quantized() &&
      !tensor._is_zerotensor();
}

// The arguments of a call, in which tensors of a device are replaced. Those with the same storage still share it.
class Arguments {
 public:
  Arguments(c10::Device device, Draws& draws) : device_(device), draws_(draws) {}

  c10::IValue kept(const c10::IValue& value, const ArgumentPlan& place) {
    if (value.isTensor()) {
      return kept(value.toTensor());
    }
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      return c10::Device(c10::kCPU);
    }
    if (value.isGenerator() || (value.isNone() && place.draws_by_default)) {
      const auto& generator = value.isNone() ? front::default_generator(device_.index()) : value.toGenerator();
      draws_.emplace_back(place.index, front::draws_from(generator));
      return c10::IValue();
    }
    if (!value.isList()) {
      return value;
    }
    const auto list = value.toList();
    auto result = c10::impl::GenericList(list.elementType());
    result.reserve(list.size());
    for (const c10::IValue& element : value.toListRef()) {
      result.push_back(element.isTensor() ? kept(element.toTensor()) : element);
    }
    return result;
  }

 private:
  // A kernel of a GPU gets numbers of the host when it is launched. The caller's tensor may belong to Python too, and must
  // not end in a thread that does work of others.
  Tensor kept(const Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.is_cpu()) {
      const BelowAutograd below;
      auto result = tensor.clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        result.unsafeGetTensorImpl()->set_wrapped_number(true);
      }
      return result;
    }
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    auto& storage = storages_[impl];
    if (!storage) {
      storage = storage_by_address(*impl);
    }
    return layouts::strided(storage, c10::DispatchKey::CPU, tensor);
  }

  const c10::Device device_;
  Draws& draws_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

// What the kernel has made goes where the caller's tensor is.
void put(const Tensor& made, Tensor& result) {
  TORCH_CHECK(made.defined() == result.defined() && (!made.defined() || made.sizes() == result.sizes()),
              "a result is of another shape than torch's meta kernel has told: ",
              made.defined() ? c10::str(made.sizes()) : "none", " instead of ",
              result.defined() ? c10::str(result.sizes()) : "none");
  const bool is_there = !made.defined() || (made.const_data_ptr() == result.const_data_ptr() &&
                                            made.strides() == result.strides() && made.dtype() == result.dtype());
  if (!is_there && made.numel() > 0) {
    result.copy_(made);
  }
}

} // namespace

Tensor by_address(const Tensor& tensor) {
  return layouts::strided(storage_by_address(*tensor.storage().unsafeGetStorageImpl()), c10::DispatchKey::CPU, tensor);
}

bool can_be_later(const OperatorPlan& plan, const c10::IValue* arguments) {
  if (!plan.can_wait || plan.waits(arguments) || plan.leaves_elements_alone || plan.asks_about_shapes) {
    return false;
  }
  // Without a generator among the arguments, the kernel itself draws. It may where it runs once for each launch.
  if (plan.dropout && arguments[*plan.dropout].toDouble() != 0 && !front::is_capturing()) {
    return false;
  }
  bool result = true;
  for (const auto& place : plan.places) {
    const auto& argument = arguments[place.index];
    result = result && !(argument.isDevice() && argument.toDevice().type() != kDevice);
    each_tensor(argument, [&](const Tensor& tensor) { result = result && is_known(tensor); });
  }
  return result;
}

bool are_on_meta(c10::ArrayRef<c10::IValue> values) {
  bool result = true;
  for (const auto& value : values) {
    each_tensor(value, [&](const Tensor& tensor) { result = result && (!tensor.defined() || tensor.is_meta()); });
  }
  return result;
}

Alone::Alone()
    : keys_(c10::default_included_set,
            c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                c10::autocast_dispatch_keyset) {}

Later::Later(const OperatorPlan& plan, c10::Device device, c10::ArrayRef<c10::IValue> arguments,
             c10::ArrayRef<c10::IValue> results)
    : plan_(&plan), arguments_(arguments.begin(), arguments.end()) {
  Arguments all(device, draws_);
  for (const auto& place : plan.places) {
    arguments_[place.index] = all.kept(arguments[place.index], place);
  }
  for (const auto& result : results) {
    each_tensor(result, [&](const Tensor& tensor) {
      results_.push_back(tensor.defined() ? by_address(tensor) : tensor);
    });
  }
}

void Later::operator()() {
  const Alone alone;
  try {
    auto stack = arguments_;
    for (const auto& [index, draw] : draws_) {
      stack[index] = draw();
    }
    plan_->call(&stack);
    size_t count = 0;
    for (const auto& value : stack) {
      each_tensor(value, [&](const Tensor& made) {
        TORCH_CHECK(count < results_.size(), "there are more results than torch's meta kernel has told");
        put(made, results_[count++]);
      });
    }
  } catch (const c10::Error& error) {
    throw std::runtime_error(plan_->op.operator_name().name + ": " + error.what_without_backtrace());
  }
}

} // namespace simulated
