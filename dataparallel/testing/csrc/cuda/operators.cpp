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
      "aten::empty",        "aten::empty_strided",    "aten::as_strided",
      "aten::view",         "aten::_reshape_alias",   "aten::view_as_real",
      "aten::view_as_complex", "aten::unfold",        "aten::alias",
      "aten::resize_",      "aten::set_",             "aten::record_stream",
      "aten::copy_",        "aten::_local_scalar_dense", "aten::is_pinned",
      "aten::_pin_memory",  "aten::_efficientzerotensor", "aten::native_dropout",
      "aten::_nested_view_from_buffer", "aten::_nested_view_from_jagged",
      "aten::_fused_sdp_choice", // from the capability of the device
  };
  return names.count(name) > 0;
}

template <c10::DispatchKey key>
bool replaces(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  return op.hasKernelForDispatchKey(key) && !is_torchs(name) && !is_a_list_operator(op);
}

// Operators that torch composes of others except on CUDA, where they are one kernel.
void register_compositions() {
  static torch::Library library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(kKey)) {
    const auto op = *dispatcher.findOp(name);
    const bool is_composed = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (name.name.rfind("aten::", 0) == 0 && is_composed && !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !is_torchs(name.name) && !is_a_list_operator(op)) {
      library.impl(full_name(name).c_str(), on_cpu(op));
    }
  }
}

// Composite operators that would choose kernels of cuDNN.
void register_convolutions() {
  static torch::Library library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  for (const char* name : {"convolution", "convolution_backward"}) {
    library.impl(name, on_cpu(c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + std::string(name)).c_str(), "")));
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
  register_what_the_cpu_has(Key::CPU, kKey, replaces<kKey>);
  register_what_the_cpu_has(Key::SparseCPU, kSparseKey, replaces<kSparseKey>);
  register_what_the_cpu_has(Key::SparseCsrCPU, kSparseCsrKey, replaces<kSparseCsrKey>);
  register_what_the_cpu_has(Key::NestedTensorCPU, kNestedKey, replaces<kNestedKey>);
  register_what_the_cpu_has(Key::QuantizedCPU, Key::QuantizedCUDA, replaces<Key::QuantizedCUDA>);
  register_list_operators();
  register_compositions();
  register_convolutions();
  register_meanings();
}

} // namespace simulated
