#include "on_cpu.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "counts.h"
#include "front.h"
#include "later.h"
#include "layouts.h"
#include "skipped.h"
#include "storages.h"

namespace simulated {
namespace {

// True for a list that holds tensors, or lists of tensors (as in torch.distributed).
bool holds_tensors(const c10::IValue& value) {
  if (!value.isList()) {
    return false;
  }
  const auto elements = value.toListRef();
  return std::any_of(elements.begin(), elements.end(), [](const c10::IValue& element) {
    return element.isTensor() || holds_tensors(element);
  });
}

// One call of an operator, with the device tensors and the CPU tensors, or meta tensors, that are made for it.
class Call {
 public:
  // If `is_later`, as in captures and where work is skipped, a meta kernel tells the shapes now, and the kernel of the CPU
  // runs at each launch of the graph.
  Call(const OperatorPlan& plan, const c10::OperatorName& name, bool is_later)
      : plan_(plan),
        name_(name),
        is_later_(is_later),
        kernel_device_(is_later || (skipped::on() && !plan.asks_about_shapes) ? c10::kMeta : c10::kCPU),
        storages_(kernel_device_) {}

  // Returns false if it cannot be done later. Then nothing has happened.
  bool run(torch::jit::Stack* stack);

 private:
  struct Written {
    at::Tensor device;
    at::Tensor standing; // for the device tensor, in the kernel
  };
  // How the operator uses an argument.
  struct Use {
    const ArgumentPlan& place;
    bool writes;
  };

  void see(const c10::IValue& value, const ArgumentPlan& place);
  void see_tensor(const at::Tensor& tensor, const ArgumentPlan& place);
  void choose_devices(const c10::IValue* arguments);
  bool asks_meta_kernel(torch::jit::Stack* stack, const std::vector<c10::IValue>& arguments) const;
  void call_kernel(torch::jit::Stack* stack) const;
  void replace(c10::IValue& value, const Use& use);
  bool is_skipped() const {
    return kernel_device_ == c10::kMeta;
  }
  void check_layout(const at::Tensor& tensor) const;
  at::Tensor to_kernel(const at::Tensor& tensor);
  at::Tensor argument_to_kernel(const at::Tensor& tensor, const Use& use);
  void touch(const at::Tensor& tensor, const Use& use);
  void put_back(c10::IValue& value);
  at::Tensor to_device(at::Tensor&& tensor);
  layouts::Members members_to_device(const at::Tensor& tensor);
  at::Tensor result_to_device(at::Tensor&& tensor);
  c10::DataPtr take_over(const c10::Storage& storage, c10::Device device);
  void has_made(const c10::DataPtr& data, size_t bytes);
  c10::Storage storage_to_device(const c10::Storage& storage);
  void update(const Written& written);

  const OperatorPlan& plan_;
  const c10::OperatorName& name_;
  const bool is_later_;
  const c10::DeviceType kernel_device_;
  std::optional<c10::Device> device_;
  c10::Device result_device_ = c10::kCPU;
  const char* cpu_argument_ = nullptr;
  const char* device_argument_ = nullptr;
  bool has_mask_ = false;
  bool touches_memory_ = false;
  Storages storages_;
  c10::SmallVector<Written, 2> written_;
  c10::SmallVector<Touch, 6> touches_;
  clocks::Ticket ticket_;
  Work work_;
};

void Call::see_tensor(const at::Tensor& tensor, const ArgumentPlan& place) {
  if (!tensor.defined()) {
    return;
  }
  const auto device = tensor.device();
  if (device.type() == kDevice) {
    if (!device_) {
      device_ = device;
      device_argument_ = place.name;
    }
    TORCH_CHECK(*device_ == device, "Expected all tensors to be on the same device, but found at least two devices, ",
                device_->str(), " and ", device.str(), "! (when checking argument '", place.name, "' of ", name_.name,
                "; '", device_argument_, "' is on ", device_->str(), ")");
  } else if (device.is_cpu() && !cpu_argument_ && !place.may_be_on_the_cpu) {
    // A tensor without dimensions may be on the CPU, unless the operator writes it.
    if (tensor.dim() > 0 || place.says_it_writes) {
      cpu_argument_ = place.name;
    }
  }
}

void Call::see(const c10::IValue& value, const ArgumentPlan& place) {
  if (value.isTensor()) {
    see_tensor(value.toTensor(), place);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isTensor() && !element.isList() && !element.isNone()) {
        return; // a list of numbers
      }
      see(element, place);
    }
  }
}

// Results are on the device of the device argument. Without one they are on the device of the tensors.
void Call::choose_devices(const c10::IValue* arguments) {
  std::optional<c10::Device> wanted, drawn_on;
  for (const auto& place : plan_.places) {
    const auto& argument = arguments[place.index];
    see(argument, place);
    if (argument.isDevice()) {
      wanted = argument.toDevice();
      if (wanted->type() == kDevice && !wanted->has_index()) {
        wanted = current_device();
      }
    } else if (argument.isGenerator() && argument.toGenerator().device().type() == kDevice) {
      drawn_on = argument.toGenerator().device();
    }
  }
  TORCH_CHECK(!device_ || !cpu_argument_,
              "Expected all tensors to be on the same device, but found at least two devices, ", device_->str(),
              " and cpu! (when checking argument '", cpu_argument_, "' of ", name_.name, "; '", device_argument_,
              "' is on ", device_->str(), ")");
  if (!device_) {
    device_ = wanted && wanted->type() == kDevice ? *wanted : drawn_on.value_or(current_device());
  }
  result_device_ = wanted.value_or(*device_);
}

void Call::check_layout(const at::Tensor& tensor) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_skipped() || layouts::is_strided(tensor), name_.name, " of a ",
      tensor.is_nested() ? "nested" : c10::str(tensor.layout()), " tensor on ", device_->str(),
      ": simulate(compute=False) has strided tensors only, because the shapes of others depend on values");
}

at::Tensor Call::to_kernel(const at::Tensor& tensor) {
  check_layout(tensor);
  if (layouts::is_strided(tensor)) {
    const auto key = is_skipped() ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
    return layouts::strided(storages_.standing_for(tensor.storage()), key, tensor);
  }
  auto parts = layouts::members(tensor, name_.name);
  for (auto& part : parts) {
    part = part.defined() ? to_kernel(part) : part;
  }
  return layouts::made_of(parts, tensor, c10::kCPU);
}

void Call::touch(const at::Tensor& tensor, const Use& use) {
  touches_memory_ = touches_memory_ || tensor.numel() > 0;
  if (!clocks::enabled()) {
    return;
  }
  if (layouts::is_strided(tensor)) {
    add_touch(touches_, tensor, use.writes, use.place.name);
    return;
  }
  for (const auto& part : layouts::members(tensor, name_.name)) {
    if (part.defined()) {
      add_touch(touches_, part, use.writes, use.place.name);
    }
  }
}

at::Tensor Call::argument_to_kernel(const at::Tensor& tensor, const Use& use) {
  if (!tensor.defined() || tensor.device().type() != kDevice) {
    // torch's meta kernels take fewer tensors without dimensions on the CPU than the CPU's kernels do. All take numbers.
    const bool is_one_element = tensor.defined() && tensor.is_cpu() && tensor.dim() == 0 &&
        !tensor.unsafeGetTensorImpl()->is_wrapped_number() && !use.place.may_be_on_the_cpu;
    return is_skipped() && is_one_element ? skipped::without_value(tensor) : tensor;
  }
  if (use.writes || use.place.is_read) {
    touch(tensor, use);
  }
  work_.argument(tensor, use.place.is_read || (use.writes && !use.place.is_overwritten), use.writes);
  if (use.place.selects && (tensor.scalar_type() == c10::kBool || tensor.scalar_type() == c10::kByte)) {
    has_mask_ = true;
  }
  auto result = to_kernel(tensor);
  // Some kernels ask: attention takes another one for a mask that needs a gradient, and a sparse maximum keeps indices.
  if (tensor.requires_grad()) {
    result.set_requires_grad(true);
  }
  if (use.writes) {
    written_.push_back({tensor, result});
  }
  return result;
}

void Call::replace(c10::IValue& value, const Use& use) {
  if (value.isTensor()) {
    value = argument_to_kernel(value.toTensor(), use);
  } else if (holds_tensors(value)) {
    // The list belongs to the caller, so it must not change.
    const auto list = value.toList();
    auto replaced = c10::impl::GenericList(list.elementType());
    replaced.reserve(list.size());
    for (c10::IValue element : value.toListRef()) {
      replace(element, use);
      replaced.push_back(std::move(element));
    }
    value = std::move(replaced);
  } else if (value.isDevice() && value.toDevice().type() == kDevice) {
    value = c10::Device(kernel_device_);
  } else if (value.isGenerator() && is_later_) {
    value = c10::IValue(); // it is drawn from when it is certain that the operator can be late
  } else if (value.isGenerator()) {
    const auto source = front::drawn_from(value.toGenerator());
    value = is_skipped() ? c10::IValue() : c10::IValue(source); // nothing is drawn
  } else if (value.isNone() && use.place.draws_by_default && !is_skipped()) {
    value = front::drawn_from(front::default_generator(device_->index()));
  }
}

c10::DataPtr Call::take_over(const c10::Storage& storage, c10::Device device) {
  auto data = front::adopt(storage, device);
  has_made(data, storage.nbytes());
  return data;
}

void Call::has_made(const c10::DataPtr& data, size_t bytes) {
  if (front::wrote(ticket_, name_.name, data, bytes)) {
    touches_memory_ = true;
    work_.made(bytes);
  }
}

c10::Storage Call::storage_to_device(const c10::Storage& storage) {
  if (const auto* known = storages_.on_device(storage)) {
    return *known;
  }
  c10::Storage made = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), take_over(storage, result_device_),
      front::allocator(), /*resizable=*/true);
  storages_.add(storage, made);
  return made;
}

at::Tensor Call::to_device(at::Tensor&& tensor) {
  check_layout(tensor);
  if (layouts::is_strided(tensor)) {
    if (storages_.on_device(tensor.storage()) || !layouts::is_plain_and_unshared(tensor)) {
      return layouts::strided(storage_to_device(tensor.storage()), kKey, tensor);
    }
    // Nobody else refers to the tensor or its storage, so both can be converted in place.
    front::convert(*tensor.storage().unsafeGetStorageImpl(), result_device_);
    has_made(tensor.storage().data_ptr(), tensor.storage().nbytes());
    return layouts::now_on(std::move(tensor), result_device_);
  }
  return layouts::made_of(members_to_device(tensor), tensor, result_device_);
}

layouts::Members Call::members_to_device(const at::Tensor& tensor) {
  auto parts = layouts::members(tensor, name_.name);
  for (auto& part : parts) {
    part = part.defined() ? to_device(std::move(part)) : part;
  }
  return parts;
}

at::Tensor Call::result_to_device(at::Tensor&& tensor) {
  if (!tensor.defined() || tensor.device().type() != kernel_device_) {
    return std::move(tensor);
  }
  for (const auto& written : written_) {
    if (written.standing.is_same(tensor)) {
      return written.device;
    }
  }
  return result_device_.is_cpu() ? std::move(tensor) : to_device(std::move(tensor));
}

void Call::put_back(c10::IValue& value) {
  if (value.isTensor()) {
    value = result_to_device(std::move(value).toTensor());
  } else if (holds_tensors(value)) {
    const auto list = value.toList();
    auto replaced = c10::impl::GenericList(list.elementType());
    replaced.reserve(list.size());
    for (c10::IValue element : value.toListRef()) {
      put_back(element);
      replaced.push_back(std::move(element));
    }
    value = std::move(replaced);
  }
}

// Updates the device tensor with what the kernel has changed besides bytes: the shape, the memory (out=, resize), or
// the parts of a sparse tensor.
void Call::update(const Written& written) {
  auto* impl = written.device.unsafeGetTensorImpl();
  const auto& standing = written.standing;
  if (!layouts::is_strided(standing)) {
    layouts::set_members(written.device, members_to_device(standing), standing);
    return;
  }
  auto* before = written.device.storage().unsafeGetStorageImpl();
  auto* storage = standing.storage().unsafeGetStorageImpl();
  if (storage->data() != before->data() || storage->nbytes() != before->nbytes()) {
    before->set_data_ptr(take_over(standing.storage(), *device_));
    before->set_nbytes(storage->nbytes());
    storages_.have_moved(standing.storage());
  }
  if (standing.sizes() != written.device.sizes() || standing.strides() != written.device.strides() ||
      standing.storage_offset() != written.device.storage_offset()) {
    impl->set_sizes_and_strides(standing.sizes(), standing.strides(), standing.storage_offset());
  }
}

// On failure, the arguments are on the stack again: at once, the kernel of the CPU says what is wrong with them.
bool Call::asks_meta_kernel(torch::jit::Stack* stack, const std::vector<c10::IValue>& arguments) const {
  const auto before = stack->size() - plan_.arguments;
  const BelowAutograd below;
  if (!has_mask_ && skipped::answers(plan_, stack) &&
      are_on_meta(c10::ArrayRef<c10::IValue>(stack->data() + before, plan_.returns))) {
    return true;
  }
  stack->resize(before);
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  return false;
}

void Call::call_kernel(torch::jit::Stack* stack) const {
  try {
    const BelowAutograd below;
    if (is_skipped()) {
      skipped::call(plan_, stack, name_.name);
    } else {
      plan_.call(stack);
    }
  } catch (...) {
    ticket_.failed();
    throw;
  }
}

bool Call::run(torch::jit::Stack* stack) {
  auto* const arguments = stack->data() + (stack->size() - plan_.arguments);
  choose_devices(arguments);
  work_.called(plan_.op, arguments);
  const OnDevice on(*device_);
  const bool waits = plan_.waits(arguments);
  const std::vector<c10::IValue> for_later(arguments, arguments + (is_later_ ? plan_.arguments : 0));
  for (const auto& place : plan_.places) {
    const bool trains = place.is_written_in_training && arguments[OperatorPlan::kTraining].toBool();
    replace(arguments[place.index], {place, place.says_it_writes || place.is_written_unsaid || trains});
  }
  if (is_later_ && !asks_meta_kernel(stack, for_later)) {
    return false;
  }
  if (is_skipped() && !is_later_ && (has_mask_ || plan_.waits_for_values)) {
    skipped::refuse(name_.name + (has_mask_ ? " with a mask" : ""));
  }
  ticket_ = front::launch(*device_, name_.name, touches_, is_later_);
  if (!is_later_) {
    call_kernel(stack);
  }
  for (const auto& written : written_) {
    update(written);
  }
  for (auto value = stack->end() - static_cast<ptrdiff_t>(plan_.returns); value != stack->end(); ++value) {
    put_back(*value);
  }
  if (is_later_) {
    const c10::ArrayRef<c10::IValue> results(stack->data() + (stack->size() - plan_.returns), plan_.returns);
    front::later(*device_, Later(plan_, *device_, for_later, results));
  }
  if (touches_memory_ && !plan_.leaves_elements_alone) {
    if (!ticket_.kept) {
      counts::launched(device_->index());
    }
    work_.returned(c10::ArrayRef<c10::IValue>(stack->data() + (stack->size() - plan_.returns), plan_.returns));
    clocks::done(ticket_, std::move(work_));
  }
  if (has_mask_ || waits) {
    front::host_waits(*device_, name_.name);
  }
  return true;
}

} // namespace

at::Tensor cpu_alias(const at::Tensor& tensor) {
  return layouts::strided(storage_over(tensor.storage(), c10::kCPU), c10::DispatchKey::CPU, tensor);
}

at::Tensor meta_alias(const at::Tensor& tensor) {
  return layouts::strided(storage_over(tensor.storage(), c10::kMeta), c10::DispatchKey::Meta, tensor);
}

void run_on_cpu(const OperatorPlan& plan, torch::jit::Stack* stack, const c10::OperatorName& name) {
  if ((front::is_skipping() || front::is_capturing()) && can_be_later(plan, stack->data() + (stack->size() - plan.arguments)) &&
      Call(plan, name, true).run(stack)) {
    return;
  }
  Call(plan, name, false).run(stack);
}

} // namespace simulated
