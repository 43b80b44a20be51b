// Operators of a library that is loaded after the start of a stand-in. What its kernels for CUDA compute tells that they
// were called.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full_like.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace {

at::Tensor on_the_cpu(const at::Tensor& x) {
  TORCH_CHECK(x.is_cpu());
  return x + 1;
}

at::Tensor on_cuda(const at::Tensor& x) {
  return at::full_like(x, -1);
}

void write_on_the_cpu(at::Tensor x) {
  TORCH_CHECK(x.is_cpu());
  x.data_ptr<float>()[0] = 5;
}

void write_on_cuda(at::Tensor x) {
  x.fill_(-1);
}

} // namespace

TORCH_LIBRARY(later, m) {
  m.def("both(Tensor x) -> Tensor");
  m.def("write(Tensor(a!) x) -> ()");
  m.def("only_cuda(Tensor x) -> Tensor");
  m.def("only_cpu(Tensor x) -> Tensor");
  m.def("by_default(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(later, CPU, m) {
  m.impl("both", on_the_cpu);
  m.impl("write", write_on_the_cpu);
  m.impl("only_cpu", on_the_cpu);
}

TORCH_LIBRARY_IMPL(later, CompositeExplicitAutograd, m) {
  m.impl("by_default", on_the_cpu);
}

TORCH_LIBRARY_IMPL(later, CUDA, m) {
  m.impl("both", on_cuda);
  m.impl("write", write_on_cuda);
  m.impl("only_cuda", on_cuda);
  m.impl("by_default", on_cuda);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}
