// Convolutions and samplers that torch has of cuDNN, by the operators of the CPU that mean the same.
#include <ATen/core/Tensor.h>
#include <ATen/ops/affine_grid_generator.h>
#include <ATen/ops/affine_grid_generator_backward.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/grid_sampler_2d.h>
#include <ATen/ops/grid_sampler_2d_backward.h>

#include "meanings.h"

namespace simulated::meanings {
namespace {

using at::Tensor;
using Ints = at::IntArrayRef;
using OptTensor = std::optional<Tensor>;

Tensor convolution(const Tensor& self, const Tensor& weight, Ints padding, Ints stride, Ints dilation, int64_t groups,
                   bool, bool, bool) {
  const std::vector<int64_t> none(padding.size(), 0);
  return at::convolution(self, weight, {}, stride, padding, dilation, false, none, groups);
}

Tensor transposed_convolution(const Tensor& self, const Tensor& weight, Ints padding, Ints output_padding, Ints stride,
                              Ints dilation, int64_t groups, bool, bool, bool) {
  return at::convolution(self, weight, {}, stride, padding, dilation, true, output_padding, groups);
}

Tensor convolution_relu(const Tensor& self, const Tensor& weight, const OptTensor& bias, Ints stride, Ints padding,
                        Ints dilation, int64_t groups) {
  const std::vector<int64_t> none(padding.size(), 0);
  return at::convolution(self, weight, bias, stride, padding, dilation, false, none, groups).relu_();
}

Tensor convolution_add_relu(const Tensor& self, const Tensor& weight, const Tensor& z,
                            const std::optional<at::Scalar>& alpha, const OptTensor& bias, Ints stride, Ints padding,
                            Ints dilation, int64_t groups) {
  const std::vector<int64_t> none(padding.size(), 0);
  auto result = at::convolution(self, weight, bias, stride, padding, dilation, false, none, groups);
  return result.add_(z, alpha.value_or(1)).relu_();
}

// Bilinear, zeros outside, corners aligned: cuDNN has no other.
Tensor grid_sampler(const Tensor& self, const Tensor& grid) {
  return at::grid_sampler_2d(self, grid, 0, 0, true);
}
std::tuple<Tensor, Tensor> grid_sampler_backward(const Tensor& self, const Tensor& grid, const Tensor& grad) {
  return at::grid_sampler_2d_backward(grad, self, grid, 0, 0, true, {true, true});
}

Tensor affine_grid(const Tensor& theta, int64_t n, int64_t c, int64_t h, int64_t w) {
  return at::affine_grid_generator(theta, {n, c, h, w}, true);
}
Tensor affine_grid_backward(const Tensor& grad, int64_t n, int64_t c, int64_t h, int64_t w) {
  return at::affine_grid_generator_backward(grad, {n, c, h, w}, true);
}

// torch's own kernels compute it.
bool no_ctc_loss(const Tensor&, const Tensor&, Ints, Ints, int64_t) {
  return false;
}
bool no_ctc_loss_of_tensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) {
  return false;
}

} // namespace

void add_layers_of_cudnn(torch::Library& library) {
  add(library, "cudnn_convolution", &convolution);
  add(library, "cudnn_convolution_transpose", &transposed_convolution);
  add(library, "cudnn_convolution_relu", &convolution_relu);
  add(library, "cudnn_convolution_add_relu", &convolution_add_relu);
  add(library, "cudnn_grid_sampler", &grid_sampler);
  add(library, "cudnn_grid_sampler_backward", &grid_sampler_backward);
  add(library, "cudnn_affine_grid_generator", &affine_grid);
  add(library, "cudnn_affine_grid_generator_backward", &affine_grid_backward);
  library.impl("_use_cudnn_ctc_loss", &no_ctc_loss);
  library.impl("_use_cudnn_ctc_loss.Tensor", &no_ctc_loss_of_tensors);
}

} // namespace simulated::meanings
