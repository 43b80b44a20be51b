// Batch norm as torch computes it with cuDNN, and its parts as SyncBatchNorm uses them. Statistics are those of the
// second dimension.
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>

#include "meanings.h"

namespace simulated::meanings {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

// Halves are added up as float32.
Tensor widened(const Tensor& tensor) {
  return tensor.to(at::toOpMathType(tensor.scalar_type()));
}

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    if (dim != 1) {
      dims.push_back(dim);
    }
  }
  return dims;
}

Tensor along_channels(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = -1;
  return values.reshape(shape);
}

bool has(const OptTensor& tensor) {
  return tensor && tensor->defined();
}

// ---- the parts

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  const auto wide = widened(input);
  const auto dims = all_but_channels(input);
  return {wide.mean(dims), wide.var(dims, /*unbiased=*/false).add(eps).rsqrt()};
}

Tensor elements(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                const Tensor& invstd, double) {
  auto result = widened(input).sub(along_channels(mean, input)).mul(along_channels(invstd, input));
  result = has(weight) ? result.mul(along_channels(*weight, input)) : result;
  result = has(bias) ? result.add(along_channels(*bias, input)) : result;
  return result.to(input.scalar_type());
}

Tensor& elements_out(const Tensor& input, const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                     const Tensor& invstd, double eps, Tensor& out) {
  out.resize_(input.sizes());
  return out.copy_(elements(input, weight, bias, mean, invstd, eps));
}

// Of the averages of several parts that of the whole.
std::tuple<Tensor, Tensor> gathered(const Tensor&, const Tensor& mean, const Tensor& invstd,
                                    const OptTensor& running_mean, const OptTensor& running_var, double momentum,
                                    double eps, const Tensor& counts) {
  const auto weights = counts.to(mean.scalar_type()).reshape({-1, 1});
  const auto count = weights.sum();
  const auto whole = mean.mul(weights).sum(0).div(count);
  const auto squares = invstd.pow(-2).sub(eps).add(mean.sub(whole).square()).mul(weights).sum(0);
  if (has(running_mean)) {
    running_mean->mul_(1 - momentum).add_(whole.mul(momentum));
  }
  if (has(running_var)) {
    running_var->mul_(1 - momentum).add_(squares.div(count.sub(1)).mul(momentum));
  }
  return {whole, squares.div(count).add(eps).rsqrt()};
}

std::tuple<Tensor, Tensor> gathered_of_equals(const Tensor& input, const Tensor& mean, const Tensor& invstd,
                                              const OptTensor& running_mean, const OptTensor& running_var,
                                              double momentum, double eps, int64_t count) {
  const auto counts = at::full_like(mean.select(1, 0), count);
  return gathered(input, mean, invstd, running_mean, running_var, momentum, eps, counts);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_sums(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                         const Tensor& invstd, const OptTensor& weight, bool of_input,
                                                         bool of_weight, bool of_bias) {
  const auto dims = all_but_channels(input);
  const auto sum = widened(grad).sum(dims);
  const auto product = widened(grad).mul(widened(input).sub(along_channels(mean, input))).sum(dims);
  const auto type = has(weight) ? weight->scalar_type() : input.scalar_type();
  return {of_input ? sum : Tensor(), of_input ? product : Tensor(),
          of_weight ? product.mul(invstd).to(type) : Tensor(), of_bias ? sum.to(type) : Tensor()};
}

Tensor backward_elements(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                         const OptTensor& weight, const Tensor& sum, const Tensor& product, const Tensor& count) {
  const auto wide = widened(input);
  const auto total = count.sum().to(wide.scalar_type());
  const auto slope = along_channels(product.div(total).mul(invstd.square()), input);
  auto result = widened(grad).sub(along_channels(sum.div(total), input));
  result = result.sub(wide.sub(along_channels(mean, input)).mul(slope)).mul(along_channels(invstd, input));
  result = has(weight) ? result.mul(along_channels(*weight, input)) : result;
  return result.to(input.scalar_type());
}

// ---- cuDNN's

std::tuple<Tensor, Tensor, Tensor, Tensor> of_cudnn(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                                                    const OptTensor& running_mean, const OptTensor& running_var,
                                                    bool training, double momentum, double eps) {
  auto [output, mean, invstd] =
      at::native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps);
  const auto nothing = at::empty({0}, weight.options());
  return {output, training ? mean : nothing, training ? invstd : nothing,
          at::empty({0}, input.options().dtype(c10::kByte))};
}

std::tuple<Tensor, Tensor, Tensor> of_cudnn_backward(const Tensor& input, const Tensor& grad, const Tensor& weight,
                                                     const OptTensor& running_mean, const OptTensor& running_var,
                                                     const OptTensor& mean, const OptTensor& invstd, double eps,
                                                     const Tensor&) {
  return at::native_batch_norm_backward(grad, input, weight, running_mean, running_var, mean, invstd, /*train=*/true,
                                        eps, {true, true, true});
}

} // namespace

void add_batch_norm(torch::Library& library) {
  add(library, "batch_norm_stats", &stats);
  add(library, "batch_norm_elemt", &elements);
  add(library, "batch_norm_elemt.out", &elements_out);
  add(library, "batch_norm_gather_stats", &gathered_of_equals);
  add(library, "batch_norm_gather_stats_with_counts", &gathered);
  add(library, "batch_norm_backward_reduce", &backward_sums);
  add(library, "batch_norm_backward_elemt", &backward_elements);
  add(library, "cudnn_batch_norm", &of_cudnn);
  add(library, "cudnn_batch_norm_backward", &of_cudnn_backward);
}

} // namespace simulated::meanings
