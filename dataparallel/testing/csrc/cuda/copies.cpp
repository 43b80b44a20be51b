// Copies of tensors. What torch does by copies of bytes stays torch's, so that its streams, events and peers are real.
// Where torch launches a kernel, because elements are converted or are not in one piece, the CPU copies.
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "front.h"
#include "on_cpu.h"

namespace simulated {
namespace {

using at::Tensor;

// True if torch copies these tensors byte by byte, as `copy_kernel_cuda` decides.
bool is_by_bytes(const Tensor& self, const Tensor& source) {
  if (self.scalar_type() != source.scalar_type() || self.is_conj() != source.is_conj() ||
      self.is_neg() != source.is_neg()) {
    return false;
  }
  const auto iterator = at::TensorIteratorConfig()
                            .add_output(self)
                            .add_const_input(source)
                            .resize_outputs(false)
                            .check_all_same_dtype(false)
                            .check_all_same_device(false)
                            .build();
  return iterator.is_contiguous();
}

void copy_elements(Tensor& self, const Tensor& source, bool non_blocking) {
  static const OperatorPlan plan(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  torch::jit::Stack stack{self, source, non_blocking};
  run_on_cpu(plan, &stack, plan.op.operator_name());
}

// With several devices, elements are converted and packed where they are, and the bytes are sent.
void copy_between(Tensor& self, const Tensor& source, bool non_blocking) {
  auto packed = at::empty_like(self, source.options().dtype(self.scalar_type()), at::MemoryFormat::Contiguous);
  copy_elements(packed, source, non_blocking);
  if (is_by_bytes(self, packed)) {
    at::native::copy_(self, packed, non_blocking);
    return;
  }
  auto arrived = at::empty_like(self, at::MemoryFormat::Contiguous);
  at::native::copy_(arrived, packed, non_blocking);
  copy_elements(self, arrived, non_blocking);
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  const BelowAutograd below;
  const bool is_among_devices = self.is_cuda() && source.is_cuda();
  const bool is_plain = self.layout() == c10::kStrided && source.layout() == c10::kStrided && !self.is_quantized() &&
      !source.is_quantized() && self.numel() > 0 && !self.is_same(source) && !source._is_zerotensor();
  if (!is_among_devices || !is_plain || is_by_bytes(self, source)) {
    return at::native::copy_(self, source, non_blocking);
  }
  if (self.device() == source.device()) {
    copy_elements(self, source, non_blocking);
  } else {
    copy_between(self, source, non_blocking);
  }
  return self;
}

} // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", TORCH_FN(copy));
}

} // namespace simulated
