// The operators that simulated devices implement themselves: those that allocate, copy or view memory, and those that
// torch requires of this kind of backend. For all others registered.cpp registers the CPU's.
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/resize.h>
#include <ATen/ops/view_native.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include "counts.h"
#include "current.h"
#include "memory.h"
#include "on_cpu.h"
#include "skipped.h"

namespace simulated {
namespace {

using at::Tensor;

c10::OperatorHandle handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// ---- memory

void check_unpinned(std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

c10::Device device_or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : current_device();
}

Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool> pin_memory,
             std::optional<c10::MemoryFormat> format) {
  check_unpinned(pin_memory);
  const OnDevice on(device_or_current(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), memory::device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_unpinned(pin_memory);
  const OnDevice on(device_or_current(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           memory::device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// Zeros without memory. Forward-mode autograd uses them as the derivatives of constants.
Tensor efficient_zeros(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                       std::optional<c10::Device> device, std::optional<bool>) {
  at::native::ZeroTensorAllocator none(device_or_current(device));
  const c10::DispatchKeySet keys({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor});
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &none, keys, c10::dtype_or_default(dtype),
                                   std::nullopt);
}

// The memory grows before the shape changes, so that a tensor stays as it was if its device is full.
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (impl->sizes() != sizes) { // as on the CPU, the strides stay if the shape does
    if (c10::multiply_integers(sizes) > 0) {
      const auto bytes = at::detail::computeStorageNbytesContiguous(
          sizes, impl->dtype().itemsize(), static_cast<size_t>(impl->storage_offset()));
      memory::grow(*impl->storage().unsafeGetStorageImpl(), bytes);
    }
    impl->set_sizes_contiguous(sizes);
  }
  if (format && *format != c10::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_storage_at(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                       c10::SymIntArrayRef stride) {
  const auto begin = offset.guard_int(__FILE__, __LINE__);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  c10::DimVector strides(C10_AS_INTARRAYREF_SLOW(stride));
  if (strides.empty() && !sizes.empty()) {
    strides = c10::contiguous_strides(sizes);
  }
  const bool fits = begin >= 0 && sizes.size() == strides.size() && source.device() == self.device();
  if (fits && c10::multiply_integers(sizes) > 0) {
    const auto item = self.dtype().itemsize();
    const auto bytes = at::detail::computeStorageNbytes(sizes, strides, item, static_cast<size_t>(begin));
    memory::grow(*source.unsafeGetStorageImpl(), bytes);
  }
  at::native::checkSetStorage<int64_t>(self, std::move(source), begin, sizes, strides); // also sets the storage
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, begin);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_at(self, std::move(source), 0, {c10::SymInt(elements)}, {c10::SymInt(1)});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_at(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_empty(Tensor& self) {
  const OnDevice on(self.device());
  at::Storage nothing = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, memory::device_allocator()->allocate(0), memory::device_allocator(), true);
  return set_storage_at(self, std::move(nothing), 0, {c10::SymInt(0)}, {c10::SymInt(1)});
}

void record_stream(Tensor& self, c10::Stream stream) {
  memory::device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// ---- views

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// True if `self.data = from` is allowed. Then `Module.to` keeps its parameter objects, and so parameters that are tied
// stay tied.
bool may_become(const Tensor& self, const Tensor& from) {
  auto ours = [](const Tensor& t) {
    return t.layout() == c10::kStrided && (t.is_cpu() || t.device().type() == c10::kPrivateUse1);
  };
  return (ours(self) && ours(from)) || self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

// ---- copies

bool is_simulated(const Tensor& tensor) {
  return tensor.device().type() == c10::kPrivateUse1;
}

// Without kernels this only checks the shapes.
void copy_elements(const Tensor& self, const Tensor& to) {
  const BelowAutograd below;
  if (skipped::on()) {
    meta_alias(to).copy_(meta_alias(self));
  } else {
    const auto source = is_simulated(self) ? cpu_alias(self) : self;
    const auto target = is_simulated(to) ? cpu_alias(to) : to;
    target.copy_(source);
  }
}

// A copy between devices is ordered with the current streams of both, as torch's CUDA copies are. A copy from the host
// blocks unless `non_blocking` is true; pageable memory is then staged. A copy to the host blocks unless `non_blocking`
// is true and the host memory is pinned.
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (skipped::on() && !is_simulated(to) && to.numel() > 0) {
    skipped::refuse("aten::_copy_from from " + self.device().str() + " to " + to.device().str() +
                    " (cpu, to, tolist, print, torch.save)");
  }
  const auto at = is_simulated(to) ? current_stream(to.device()) : current_stream(self.device());
  const auto launched_on = is_simulated(self) ? current_stream(self.device()) : at;
  const auto joined = is_simulated(self) && is_simulated(to) ? std::optional(at) : std::nullopt;
  Work work;
  clocks::Ticket ticket;
  if (clocks::enabled() || joined || work.is_recorded) {
    c10::SmallVector<Touch, 2> touches;
    add_touch(touches, self, false, "self");
    add_touch(touches, to, true, "dst");
    ticket = clocks::launch(launched_on, "aten::_copy_from", touches, joined);
  }
  copy_elements(self, to);
  if (to.numel() > 0) {
    // One launch and the target's bytes, whatever the layouts, because torch converts and packs before it sends.
    const auto place = [](const Tensor& tensor) {
      return is_simulated(tensor) ? tensor.device().index() : counts::kHost;
    };
    counts::launched(launched_on.device_index());
    counts::copied(place(self), place(to), to.nbytes());
    work.copied("aten::_copy_from", self, to);
    clocks::done(ticket, std::move(work));
  }
  const bool to_pageable = !is_simulated(to) && !memory::pinned_block_of(to.storage().data());
  if (!(is_simulated(self) && is_simulated(to)) && (!non_blocking || to_pageable)) {
    clocks::host_waits(launched_on);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

c10::Scalar local_scalar_dense(const Tensor& self) {
  if (skipped::on()) {
    skipped::refuse("aten::_local_scalar_dense (item, bool, int, float, if)");
  }
  const auto stream = current_stream(self.device());
  Work work;
  clocks::Ticket ticket;
  if (clocks::enabled() || work.is_recorded) {
    c10::SmallVector<Touch, 1> touches;
    add_touch(touches, self, false, "self");
    ticket = clocks::launch(stream, "aten::_local_scalar_dense", touches);
  }
  clocks::host_waits(stream);
  counts::launched(self.device().index());
  counts::copied(self.device().index(), counts::kHost, self.nbytes());
  work.copied("aten::_local_scalar_dense", self, {});
  clocks::done(ticket, std::move(work));
  return cpu_alias(self).item();
}

// ---- convolutions: torch calls separate operators for this kind of backend

void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const OperatorPlan cpu(handle("aten::convolution"));
  run_on_cpu(cpu, stack, op.operator_name());
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const OperatorPlan cpu(handle("aten::convolution_backward"));
  // (grad_output, input, weight, stride, ...) becomes (grad_output, input, weight, bias_sizes, stride, ...).
  const auto arguments = stack->end() - static_cast<ptrdiff_t>(op.schema().arguments().size());
  const auto bias = arguments->toTensor().size(1);
  stack->insert(arguments + 3, c10::IValue(std::vector<int64_t>{bias}));
  run_on_cpu(cpu, stack, op.operator_name());
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_efficientzerotensor", TORCH_FN(efficient_zeros));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_at));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_become));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// Like `copy_`, `_copy_from` handles lazily conjugated and negated tensors itself: resolving them would be a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace simulated
