// Products whose results are of another dtype than their factors, dropout with a mask, and the norm by the root of the
// mean square, each a kernel of its own on CUDA.
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>

#include <array>
#include <limits>

#include "meanings.h"

namespace simulated::meanings {
namespace {

using at::Scalar;
using at::Tensor;
using OptTensor = std::optional<Tensor>;
using Type = c10::ScalarType;

Tensor mm_to(const Tensor& self, const Tensor& other, Type type) {
  return at::mm(self.to(type), other.to(type));
}
Tensor bmm_to(const Tensor& self, const Tensor& other, Type type) {
  return at::bmm(self.to(type), other.to(type));
}
Tensor addmm_to(const Tensor& self, const Tensor& one, const Tensor& other, Type type, const Scalar& beta,
             const Scalar& alpha) {
  return at::addmm(self.to(type), one.to(type), other.to(type), beta, alpha);
}
Tensor baddbmm_to(const Tensor& self, const Tensor& one, const Tensor& other, Type type, const Scalar& beta,
               const Scalar& alpha) {
  return at::baddbmm(self.to(type), one.to(type), other.to(type), beta, alpha);
}

Tensor& put(Tensor& out, const Tensor& result) {
  if (out.sizes() != result.sizes()) {
    out.resize_(result.sizes());
  }
  return out.copy_(result);
}

Tensor& mm_out(const Tensor& self, const Tensor& other, Type type, Tensor& out) {
  return put(out, mm_to(self, other, type));
}
Tensor& bmm_out(const Tensor& self, const Tensor& other, Type type, Tensor& out) {
  return put(out, bmm_to(self, other, type));
}
Tensor& addmm_out(const Tensor& self, const Tensor& one, const Tensor& other, Type type, const Scalar& beta,
                  const Scalar& alpha, Tensor& out) {
  return put(out, addmm_to(self, one, other, type, beta, alpha));
}
Tensor& baddbmm_out(const Tensor& self, const Tensor& one, const Tensor& other, Type type, const Scalar& beta,
                    const Scalar& alpha, Tensor& out) {
  return put(out, baddbmm_to(self, one, other, type, beta, alpha));
}

// ---- dropout

// `p` is the probability that an element is kept.
std::tuple<Tensor, Tensor> fused_dropout(const Tensor& self, double p, std::optional<at::Generator> generator) {
  auto mask = at::empty_like(self, self.options().dtype(c10::kByte)).bernoulli_(p, generator);
  return {self.mul(mask).mul_(1 / p), mask};
}

Tensor masked_scale(const Tensor& self, const Tensor& mask, double scale) {
  return self.mul(mask).mul_(scale);
}

// ---- the norm

std::vector<int64_t> last_dims(size_t count) {
  std::vector<int64_t> dims;
  for (size_t i = 1; i <= count; ++i) {
    dims.push_back(-static_cast<int64_t>(i));
  }
  return dims;
}

double default_eps(Type type) {
  return type == c10::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, at::IntArrayRef shape, const OptTensor& weight,
                                    std::optional<double> eps) {
  const auto type = at::toOpMathType(input.scalar_type());
  const auto wide = input.to(type);
  const auto inverse = wide.square().mean(last_dims(shape.size()), true).add(eps.value_or(default_eps(type))).rsqrt();
  auto result = wide.mul(inverse);
  result = weight && weight->defined() ? result.mul(*weight) : result;
  return {result.to(input.scalar_type()), inverse};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef shape,
                                             const Tensor& inverse, const OptTensor& weight,
                                             std::array<bool, 2> wanted) {
  const auto wide = input.to(inverse.scalar_type());
  const auto normed = wide.mul(inverse);
  const bool scaled = weight && weight->defined();
  const auto slope = scaled ? grad.to(wide.scalar_type()).mul(*weight) : grad.to(wide.scalar_type());
  Tensor of_input, of_weight;
  if (wanted[0]) {
    const auto common = slope.mul(normed).mean(last_dims(shape.size()), true);
    of_input = slope.sub(normed.mul(common)).mul(inverse).to(input.scalar_type());
  }
  if (wanted[1] && scaled) {
    of_weight = grad.to(wide.scalar_type()).mul(normed).sum_to_size(weight->sizes()).to(weight->scalar_type());
  }
  return {of_input, of_weight};
}

} // namespace

void add_products(torch::Library& library) {
  add(library, "mm.dtype", &mm_to);
  add(library, "mm.dtype_out", &mm_out);
  add(library, "bmm.dtype", &bmm_to);
  add(library, "bmm.dtype_out", &bmm_out);
  add(library, "addmm.dtype", &addmm_to);
  add(library, "addmm.dtype_out", &addmm_out);
  add(library, "baddbmm.dtype", &baddbmm_to);
  add(library, "baddbmm.dtype_out", &baddbmm_out);
  add(library, "_fused_dropout", &fused_dropout);
  add(library, "_masked_scale", &masked_scale);
  add(library, "_fused_rms_norm", &rms_norm);
  add(library, "_fused_rms_norm_backward", &rms_norm_backward);
}

} // namespace simulated::meanings
