// Copies of tensors. What torch does by copies of bytes stays torch's, so that its streams, events and peers are real.
// Where torch launches a kernel, because elements are converted or are not in one piece, the CPU copies.
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/PeerToPeerAccess.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "counts.h"
#include "front.h"
#include "later.h"
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

// Between peers torch launches one kernel on the source's stream, which reads one device's memory and writes the other's.
// The current streams of both devices wait for each other, before and after.
void copy_between_peers(Tensor& self, const Tensor& source) {
  const auto from = c10::cuda::getCurrentCUDAStream(source.device().index()).unwrap();
  const auto to = c10::cuda::getCurrentCUDAStream(self.device().index()).unwrap();
  c10::Event is_free(c10::kCUDA), has_arrived(c10::kCUDA);
  is_free.record(to);
  is_free.block(from);
  c10::SmallVector<Touch, 2> touches;
  add_touch(touches, source, false, "src");
  add_touch(touches, self, true, "self");
  const std::string name = "aten::copy_";
  const auto ticket = front::launch(source.device(), name, touches, /*later=*/true);
  front::later(source.device(), [to = by_address(self), from = by_address(source)]() mutable {
    const Alone alone;
    to.copy_(from);
  });
  Work work;
  work.copied(name.c_str(), source, self);
  if (!ticket.kept) {
    counts::launched(source.device().index());
    counts::copied(source.device().index(), self.device().index(), self.nbytes());
  }
  clocks::done(ticket, std::move(work));
  has_arrived.record(from);
  has_arrived.block(to);
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
  } else if (at::cuda::get_p2p_access(source.device().index(), self.device().index())) {
    copy_between_peers(self, source);
  } else {
    return at::native::copy_(self, source, non_blocking); // packs and converts where the elements are, by operators
  }
  return self;
}

} // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", TORCH_FN(copy));
}

} // namespace simulated
