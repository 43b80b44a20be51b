#include "on_cpu.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "counts.h"
#include "devices.h"
#include "layouts.h"
#include "memory.h"

namespace simulated {
namespace {

constexpr auto kDevice = c10::kPrivateUse1;

void release_storage(void* storage) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(storage));
}

c10::Storage cpu_storage_over(c10::StorageImpl* storage) {
  c10::raw::intrusive_ptr::incref(storage);
  c10::DataPtr data(storage->mutable_data(), storage, &release_storage, c10::Device(c10::kCPU));
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage->nbytes(), std::move(data), c10::GetCPUAllocator(),
      /*resizable=*/true);
}

// Whether it is a list with tensors in it, or with lists of them (torch.distributed).
bool holds_tensors(const c10::IValue& value) {
  if (!value.isList()) {
    return false;
  }
  const auto elements = value.toListRef();
  return std::any_of(elements.begin(), elements.end(), [](const c10::IValue& element) {
    return element.isTensor() || holds_tensors(element);
  });
}

bool is_optional_generator(const c10::Type& type) {
  return type.kind() == c10::TypeKind::OptionalType &&
      type.castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Arguments that may be on the CPU beside device tensors, on every accelerator.
bool may_be_on_the_cpu(const std::string& op, const std::string& argument) {
  static const std::unordered_map<std::string, std::string> arguments = {
      {"aten::index", "indices"},
      {"aten::index_put", "indices"},
      {"aten::index_put_", "indices"},
      {"aten::_index_put_impl_", "indices"},
      {"aten::_pack_padded_sequence", "lengths"},
  };
  const auto found = arguments.find(op);
  return found != arguments.end() && found->second == argument;
}

// Arguments that operators write although their schemas do not say so.
bool is_written_unsaid(const std::string& op, const std::string& argument, c10::ArrayRef<c10::IValue> arguments) {
  if (op.rfind("c10d::", 0) == 0) {
    return argument == "tensor" || argument == "tensors" || argument.rfind("output", 0) == 0;
  }
  constexpr size_t kTraining = 5; // (input, weight, bias, running_mean, running_var, training, ...)
  return op == "aten::native_batch_norm" && argument.rfind("running_", 0) == 0 && arguments[kTraining].toBool();
}

// Whether the size of the result depends on values, so that the host has waited for them.
bool waits_for_values(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::data_dependent_output)) {
    return true;
  }
  // Indexing has the tag too, but only masks make it so.
  return op.hasTag(at::Tag::dynamic_output_shape) && op.operator_name().name != "aten::index";
}

// Whether it reads and writes no element: it makes memory or views, says something of a tensor's shape, or changes that.
bool leaves_elements_alone(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> names = {
      "aten::empty",
      "aten::empty_like",
      "aten::_empty_affine_quantized",
      "aten::_empty_per_channel_affine_quantized",
      "aten::_coalesced_",
      "aten::resize_as_sparse_",
      "aten::sparse_resize_",
      "aten::sparse_resize_and_clear_",
      "aten::_sparse_coo_tensor_with_dims",
      "aten::_sparse_coo_tensor_with_dims_and_tensors",
  };
  if (op.hasTag(at::Tag::inplace_view) || names.count(op.operator_name().name)) {
    return true;
  }
  const auto& returns = op.schema().returns();
  const bool returns_numbers = !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const auto& result) {
    const auto kind = result.type()->kind();
    return kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
  });
  return returns_numbers && !waits_for_values(op);
}

// One call: what has been made for it, both ways.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const c10::OperatorName& name) : op_(op), name_(name) {}

  void run(torch::jit::Stack* stack);

 private:
  struct Known {
    c10::StorageImpl* cpu;
    c10::Storage device;
    void* data; // of both
  };
  struct Written {
    at::Tensor device;
    at::Tensor cpu;
  };

  void see(const c10::IValue& value, const c10::Argument& argument);
  void see_tensor(const at::Tensor& tensor, const c10::Argument& argument);
  void choose_device(c10::ArrayRef<c10::IValue> arguments);
  void choose_result_device(c10::ArrayRef<c10::IValue> arguments);
  void replace(c10::IValue& value, bool write, bool reads, const char* argument);
  at::Tensor to_cpu(const at::Tensor& tensor);
  at::Tensor argument_to_cpu(const at::Tensor& tensor, bool write, bool reads, const char* argument);
  at::Tensor strided_to_cpu(const at::Tensor& tensor);
  void put_back(c10::IValue& value);
  at::Tensor to_device(const at::Tensor& tensor);
  layouts::Members members_to_device(const at::Tensor& tensor);
  at::Tensor result_to_device(const at::Tensor& tensor);
  c10::DataPtr take_over(const c10::Storage& storage, c10::Device device);
  c10::Storage storage_to_device(const c10::Storage& storage);
  void update(const Written& written);

  const c10::OperatorHandle& op_;
  const c10::OperatorName& name_;
  std::optional<c10::Device> device_;
  c10::Device result_device_ = c10::kCPU;
  const char* cpu_argument_ = nullptr;
  const char* device_argument_ = nullptr;
  const bool is_index_ = name_.name == "aten::index";
  bool has_mask_ = false;
  bool touches_memory_ = false;
  c10::SmallVector<Known, 6> storages_;
  c10::SmallVector<Written, 2> written_;
  c10::SmallVector<Touch, 6> touches_;
  clocks::Ticket ticket_;
};

void Call::see_tensor(const at::Tensor& tensor, const c10::Argument& argument) {
  if (!tensor.defined()) {
    return;
  }
  const auto device = tensor.device();
  if (device.type() == kDevice) {
    if (!device_) {
      device_ = device;
      device_argument_ = argument.name().c_str();
    }
    TORCH_CHECK(*device_ == device, "Expected all tensors to be on the same device, but found at least two devices, ",
                device_->str(), " and ", device.str(), "! (when checking argument '", argument.name(), "' of ", name_.name,
                "; '", device_argument_, "' is on ", device_->str(), ")");
  } else if (device.is_cpu() && !cpu_argument_ && !may_be_on_the_cpu(name_.name, argument.name())) {
    // A number may come from the CPU, but none can be written there.
    const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    if (tensor.dim() > 0 || is_written) {
      cpu_argument_ = argument.name().c_str();
    }
  }
}

void Call::see(const c10::IValue& value, const c10::Argument& argument) {
  if (value.isTensor()) {
    see_tensor(value.toTensor(), argument);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isTensor() && !element.isList() && !element.isNone()) {
        return; // a list of numbers
      }
      see(element, argument);
    }
  }
}

void Call::choose_device(c10::ArrayRef<c10::IValue> arguments) {
  const auto& schema = op_.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    see(arguments[i], schema[i]);
  }
  TORCH_CHECK(!device_ || !cpu_argument_,
              "Expected all tensors to be on the same device, but found at least two devices, ", device_->str(),
              " and cpu! (when checking argument '", cpu_argument_, "' of ", name_.name, "; '", device_argument_,
              "' is on ", device_->str(), ")");
  choose_result_device(arguments);
}

// What an operator makes is where its device argument says, and beside its tensors otherwise.
void Call::choose_result_device(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> wanted, drawn_on;
  for (const auto& argument : arguments) {
    if (argument.isDevice()) {
      wanted = argument.toDevice();
      if (wanted->type() == kDevice && !wanted->has_index()) {
        wanted = current_device();
      }
    } else if (argument.isGenerator() && argument.toGenerator().device().type() == kDevice) {
      drawn_on = argument.toGenerator().device();
    }
  }
  if (!device_) {
    device_ = wanted && wanted->type() == kDevice ? *wanted : drawn_on.value_or(current_device());
  }
  result_device_ = wanted.value_or(*device_);
}

at::Tensor Call::strided_to_cpu(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  for (const auto& known : storages_) {
    if (known.device.unsafeGetStorageImpl() == storage) {
      c10::Storage cpu(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(known.cpu));
      return layouts::strided(std::move(cpu), c10::DispatchKey::CPU, tensor);
    }
  }
  auto cpu = cpu_storage_over(storage);
  storages_.push_back({cpu.unsafeGetStorageImpl(), tensor.storage(), storage->mutable_data()});
  return layouts::strided(std::move(cpu), c10::DispatchKey::CPU, tensor);
}

at::Tensor Call::to_cpu(const at::Tensor& tensor) {
  if (layouts::is_strided(tensor)) {
    return strided_to_cpu(tensor);
  }
  auto parts = layouts::members(tensor, name_.name);
  for (auto& part : parts) {
    part = part.defined() ? to_cpu(part) : part;
  }
  return layouts::made_of(parts, tensor, c10::kCPU);
}

at::Tensor Call::argument_to_cpu(const at::Tensor& tensor, bool write, bool reads, const char* argument) {
  if (!tensor.defined() || tensor.device().type() != kDevice) {
    return tensor;
  }
  touches_memory_ = touches_memory_ || ((write || reads) && tensor.numel() > 0);
  if ((write || reads) && clocks::enabled()) {
    if (layouts::is_strided(tensor)) {
      add_touch(touches_, tensor, write, argument);
    } else {
      for (const auto& part : layouts::members(tensor, name_.name)) {
        if (part.defined()) {
          add_touch(touches_, part, write, argument);
        }
      }
    }
  }
  if (tensor.scalar_type() == c10::kBool || tensor.scalar_type() == c10::kByte) {
    has_mask_ = has_mask_ || (is_index_ && std::strcmp(argument, "indices") == 0);
  }
  auto result = to_cpu(tensor);
  if (write) {
    written_.push_back({tensor, result});
  }
  return result;
}

void Call::replace(c10::IValue& value, bool write, bool reads, const char* argument) {
  if (value.isTensor()) {
    value = argument_to_cpu(value.toTensor(), write, reads, argument);
  } else if (holds_tensors(value)) {
    // The list is the caller's, so not in place.
    const auto list = value.toList();
    auto replaced = c10::impl::GenericList(list.elementType());
    replaced.reserve(list.size());
    for (c10::IValue element : value.toListRef()) {
      replace(element, write, reads, argument);
      replaced.push_back(std::move(element));
    }
    value = std::move(replaced);
  } else if (value.isDevice() && value.toDevice().type() == kDevice) {
    value = c10::Device(c10::kCPU);
  } else if (value.isGenerator()) {
    value = drawn_from(value.toGenerator());
  }
}

c10::DataPtr Call::take_over(const c10::Storage& storage, c10::Device device) {
  auto data = memory::adopt(storage, device);
  if (auto* block = memory::block_of(data)) {
    touches_memory_ = true;
    clocks::wrote(ticket_, *block, block->bytes);
  }
  return data;
}

c10::Storage Call::storage_to_device(const c10::Storage& storage) {
  for (const auto& known : storages_) {
    if (known.cpu == storage.unsafeGetStorageImpl() && known.data == storage.data()) {
      return known.device;
    }
  }
  auto data = take_over(storage, result_device_);
  c10::Storage made = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), memory::device_allocator(),
      /*resizable=*/true);
  storages_.push_back({storage.unsafeGetStorageImpl(), made, storage.mutable_data()});
  return made;
}

at::Tensor Call::to_device(const at::Tensor& tensor) {
  if (layouts::is_strided(tensor)) {
    return layouts::strided(storage_to_device(tensor.storage()), c10::DispatchKey::PrivateUse1, tensor);
  }
  return layouts::made_of(members_to_device(tensor), tensor, result_device_);
}

layouts::Members Call::members_to_device(const at::Tensor& tensor) {
  auto parts = layouts::members(tensor, name_.name);
  for (auto& part : parts) {
    part = part.defined() ? to_device(part) : part;
  }
  return parts;
}

at::Tensor Call::result_to_device(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu()) {
    return tensor;
  }
  for (const auto& written : written_) {
    if (written.cpu.is_same(tensor)) {
      return written.device;
    }
  }
  return result_device_.is_cpu() ? tensor : to_device(tensor);
}

void Call::put_back(c10::IValue& value) {
  if (value.isTensor()) {
    value = result_to_device(value.toTensor());
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

// What a kernel changes besides the bytes of an argument: its shape, its memory (out=, resize), a sparse tensor's parts.
void Call::update(const Written& written) {
  auto* impl = written.device.unsafeGetTensorImpl();
  const auto& cpu = written.cpu;
  if (!layouts::is_strided(cpu)) {
    layouts::set_members(written.device, members_to_device(cpu), cpu);
    return;
  }
  auto* before = written.device.storage().unsafeGetStorageImpl();
  auto* storage = cpu.storage().unsafeGetStorageImpl();
  if (storage->data() != before->data() || storage->nbytes() != before->nbytes()) {
    before->set_data_ptr(take_over(cpu.storage(), *device_));
    before->set_nbytes(storage->nbytes());
    for (auto& known : storages_) {
      if (known.cpu == storage) {
        known.data = storage->mutable_data();
      }
    }
  }
  if (cpu.sizes() != written.device.sizes() || cpu.strides() != written.device.strides() ||
      cpu.storage_offset() != written.device.storage_offset()) {
    impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
}

void Call::run(torch::jit::Stack* stack) {
  const auto& schema = op_.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  const c10::ArrayRef<c10::IValue> arguments(stack->data() + first, count);
  choose_device(arguments);
  const OnDevice on(*device_);
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = schema.arguments()[i];
    auto& value = (*stack)[first + i];
    // The model of torch.cuda._sanitizer: an alias that is not written is the base of a view, not a read.
    const auto* alias = argument.alias_info();
    const bool writes = alias ? alias->isWrite() : is_written_unsaid(name_.name, argument.name(), arguments);
    replace(value, writes, !alias, argument.name().c_str());
    if (value.isNone() && is_optional_generator(*argument.type())) {
      value = drawn_from(default_generator(device_->index()));
    }
  }
  const auto stream = current_stream(*device_);
  ticket_ = clocks::launch(stream, name_.name, touches_);
  try {
    const BelowAutograd below;
    op_.callBoxed(stack);
  } catch (...) {
    ticket_.failed();
    throw;
  }
  for (const auto& written : written_) {
    update(written);
  }
  const auto returns = schema.returns().size();
  for (auto value = stack->end() - static_cast<ptrdiff_t>(returns); value != stack->end(); ++value) {
    put_back(*value);
  }
  if (touches_memory_ && !leaves_elements_alone(op_)) {
    counts::launched(device_->index());
  }
  if (has_mask_ || waits_for_values(op_)) {
    clocks::host_waits(stream);
  }
}

} // namespace

at::Tensor cpu_alias(const at::Tensor& tensor) {
  return layouts::strided(cpu_storage_over(tensor.storage().unsafeGetStorageImpl()), c10::DispatchKey::CPU, tensor);
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack, const c10::OperatorName& name) {
  Call(op, name).run(stack);
}

} // namespace simulated
