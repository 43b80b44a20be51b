#include "operators.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <unordered_set>

#include "front.h"
#include "lists.h"
#include "meanings.h"
#include "on_cpu.h"
#include "register.h"

namespace simulated {
namespace {

// torch's own: they allocate, make views, or read and copy by functions of CUDA's runtime.
bool is_torchs(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::empty",
      "aten::empty_strided",
      "aten::as_strided",
      "aten::view",
      "aten::_reshape_alias",
      "aten::view_as_real",
      "aten::view_as_complex",
      "aten::unfold",
      "aten::alias",
      "aten::resize_",
      "aten::set_",
      "aten::record_stream",
      "aten::copy_",
      "aten::copy_sparse_to_sparse_", // also to another device
      "aten::_local_scalar_dense",
      "aten::is_pinned",
      "aten::_pin_memory",
      "aten::_efficientzerotensor",
      "aten::_nested_view_from_buffer",
      "aten::_nested_view_from_jagged",
      "aten::_fused_sdp_choice", // from the capability of the device
  };
  return names.count(name) > 0;
}

template <c10::DispatchKey key>
bool replaces(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  return op.hasKernelForDispatchKey(key) && !is_torchs(name) && !is_a_list_operator(op);
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "the stand-in for CUDA does not compute ", op.operator_name(),
                              ": the CPU has no such operator, and what it means has not been written down");
}

// What the CPU has no kernel for. Some of it torch composes of other operators except on CUDA, and the CPU computes that.
// The rest is refused: it would launch kernels that nobody computes, and not every operator of torch looks at the error
// of a launch. What is registered later replaces these.
void register_what_only_cuda_has() {
  static torch::Library library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(kKey)) {
    using Key = c10::DispatchKey;
    const auto op = *dispatcher.findOp(name);
    const auto has = [&](Key key) { return op.hasKernelForDispatchKey(key); };
    if (name.name.rfind("aten::", 0) != 0 || has(Key::CPU) || is_torchs(name.name) || is_a_list_operator(op)) {
      continue;
    }
    const bool asks = name.name.rfind("aten::_use_", 0) == 0;
    if (has(Key::CompositeExplicitAutograd) || has(Key::CompositeExplicitAutogradNonFunctional)) {
      library.impl(full_name(name).c_str(), on_cpu(op));
    } else if (!has(Key::CompositeImplicitAutograd) && !asks) {
      library.impl(full_name(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse>());
    }
  }
}

// Composite operators that would launch kernels themselves, some of cuDNN.
void register_composites() {
  static torch::Library library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  const std::pair<const char*, const char*> names[] = {
      {"convolution", ""}, {"convolution_backward", ""}, {"ldexp", "Tensor"}, {"ldexp", "out"}, {"ldexp_", ""}};
  for (const auto& [name, overload] : names) {
    const auto op = c10::Dispatcher::singleton().findSchema({std::string("aten::") + name, overload});
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      library.impl(full_name({name, overload}).c_str(), on_cpu(*op));
    }
  }
}

// Operators that only CUDA has.
void register_meanings() {
  static torch::Library library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  meanings::add_batch_norm(library);
  meanings::add_attention(library);
  meanings::add_packed_attention(library);
  meanings::add_products(library);
  meanings::add_layers_of_cudnn(library);
  meanings::replace_rnn();
}

} // namespace

void register_operators() {
  using Key = c10::DispatchKey;
  const Quietly quietly;
  register_what_only_cuda_has();
  register_what_the_cpu_has(Key::CPU, kKey, replaces<kKey>);
  register_what_the_cpu_has(Key::SparseCPU, kSparseKey, replaces<kSparseKey>);
  register_what_the_cpu_has(Key::SparseCsrCPU, kSparseCsrKey, replaces<kSparseCsrKey>);
  register_what_the_cpu_has(Key::NestedTensorCPU, kNestedKey, replaces<kNestedKey>);
  register_what_the_cpu_has(Key::QuantizedCPU, kQuantizedKey, replaces<kQuantizedKey>);
  register_list_operators();
  register_composites();
  register_composed();
  register_meanings();
}

} // namespace simulated
