// The fused kernels that scaled_dot_product_attention chooses from: queries, keys and values are (batch, heads, sequence,
// features).
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <limits>

#include "attention.h"
#include "meanings.h"

namespace simulated::meanings {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using Scale = std::optional<double>;

Rules rules_of(const Tensor& query, Scale scale, bool is_causal, double dropout, Causal causal) {
  return {scale_of(scale, query), is_causal ? causal : Causal::no, dropout};
}

// As the kernels of CUDA lay it out: the heads of one place lie side by side.
Tensor laid_out(const Tensor& output) {
  return output.transpose(1, 2).contiguous().transpose(1, 2);
}

Tensor nothing(const Tensor& like) {
  return at::empty({0}, like.options());
}

Tensor defined(const OptTensor& tensor) {
  return tensor.value_or(Tensor());
}

// ---- flash attention. It keeps the seed and an offset in one tensor.

Tensor state_of(int64_t seed, const Tensor& query) {
  if (query.is_meta()) {
    return at::empty({2}, query.options().dtype(c10::kUInt64));
  }
  auto state = at::zeros({2}, at::TensorOptions().dtype(c10::kUInt64));
  state.mutable_data_ptr<uint64_t>()[0] = static_cast<uint64_t>(seed);
  return state;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor> flash(
    const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool is_causal, bool, Scale scale) {
  const auto seed = next_seed(query, dropout);
  auto generator = drawn_from_seed(seed);
  const auto rules = rules_of(query, scale, is_causal, dropout, Causal::from_bottom_right);
  const auto [output, logsumexp] = attend(query, key, value, {}, rules, generator);
  return {laid_out(output), logsumexp, Tensor(), Tensor(), query.size(2), key.size(2), state_of(seed, query),
          nothing(query), nothing(query)};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                  const Tensor& value, const Tensor& output, const Tensor& logsumexp,
                                                  const Tensor&, const Tensor&, int64_t, int64_t, double dropout,
                                                  bool is_causal, const Tensor& state, const Tensor&, Scale scale) {
  const auto seed = dropout == 0 ? 0 : static_cast<int64_t>(state.const_data_ptr<uint64_t>()[0]);
  auto generator = drawn_from_seed(seed);
  const auto rules = rules_of(query, scale, is_causal, dropout, Causal::from_bottom_right);
  const auto grads = attend_backward(grad, query, key, value, {}, {output, logsumexp}, rules, generator);
  return {laid_out(grads.query), laid_out(grads.key), laid_out(grads.value)};
}

// ---- memory-efficient attention. Its sums are padded to a multiple of 32 queries.

Tensor padded(const Tensor& logsumexp) {
  const auto queries = logsumexp.size(-1);
  auto shape = logsumexp.sizes().vec();
  shape.back() = (queries + 31) / 32 * 32;
  auto result = at::full(shape, std::numeric_limits<double>::infinity(), logsumexp.options());
  result.narrow(-1, 0, queries).copy_(logsumexp);
  return result;
}

Tensor number(int64_t value, const Tensor& query) {
  if (query.is_meta()) {
    return at::empty({}, query.options().dtype(c10::kLong));
  }
  return at::scalar_tensor(value, at::TensorOptions().dtype(c10::kLong));
}

// It is not read where nothing is drawn, nor where only shapes are asked for.
int64_t value_of(const Tensor& seed, double dropout) {
  return dropout == 0 || seed.is_meta() ? 0 : seed.item<int64_t>();
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const OptTensor& bias, bool with_logsumexp, double dropout,
                                                     bool is_causal, Scale scale) {
  const auto seed = next_seed(query, dropout);
  auto generator = drawn_from_seed(seed);
  const auto rules = rules_of(query, scale, is_causal, dropout, Causal::from_top_left);
  const auto [output, logsumexp] = attend(query, key, value, defined(bias), rules, generator);
  return {laid_out(output), with_logsumexp ? padded(logsumexp) : logsumexp.narrow(-1, 0, 0).clone(),
          number(seed, query), number(0, query)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& grad, const Tensor& query,
                                                              const Tensor& key, const Tensor& value,
                                                              const Tensor& bias, const Tensor& output,
                                                              const Tensor& logsumexp, const Tensor& seed,
                                                              const Tensor&, double dropout, std::array<bool, 4> wanted,
                                                              bool is_causal, Scale scale) {
  if (!grad.defined()) {
    return {};
  }
  auto generator = drawn_from_seed(value_of(seed, dropout));
  const auto rules = rules_of(query, scale, is_causal, dropout, Causal::from_top_left);
  const Attended attended{output, logsumexp.narrow(-1, 0, query.size(2))};
  const auto grads = attend_backward(grad, query, key, value, bias, attended, rules, generator);
  return {laid_out(grads.query), laid_out(grads.key), laid_out(grads.value), wanted[3] ? grads.bias : Tensor()};
}

// ---- cuDNN's attention

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor> of_cudnn(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& bias, bool with_logsumexp,
    double dropout, bool is_causal, bool, Scale scale) {
  const auto seed = next_seed(query, dropout);
  auto generator = drawn_from_seed(seed);
  const auto rules = rules_of(query, scale, is_causal, dropout, Causal::from_top_left);
  const auto [output, logsumexp] = attend(query, key, value, defined(bias), rules, generator);
  return {laid_out(output), with_logsumexp ? logsumexp.unsqueeze(-1) : Tensor(), Tensor(), Tensor(), query.size(2),
          key.size(2), number(seed, query), number(0, query), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> of_cudnn_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                     const Tensor& value, const Tensor& output, const Tensor& logsumexp,
                                                     const Tensor& seed, const Tensor&, const Tensor& bias,
                                                     const Tensor&, const Tensor&, int64_t, int64_t, double dropout,
                                                     bool is_causal, Scale scale) {
  auto generator = drawn_from_seed(value_of(seed, dropout));
  const auto rules = rules_of(query, scale, is_causal, dropout, Causal::from_top_left);
  const Attended attended{output, logsumexp.squeeze(-1)};
  const auto grads = attend_backward(grad, query, key, value, bias, attended, rules, generator);
  return {laid_out(grads.query), laid_out(grads.key), laid_out(grads.value)};
}

} // namespace

void add_attention(torch::Library& library) {
  add(library, "_scaled_dot_product_flash_attention", &flash);
  add(library, "_scaled_dot_product_flash_attention_backward", &flash_backward);
  add(library, "_scaled_dot_product_efficient_attention", &efficient);
  add(library, "_scaled_dot_product_efficient_attention_backward", &efficient_backward);
  add(library, "_scaled_dot_product_cudnn_attention", &of_cudnn);
  add(library, "_scaled_dot_product_cudnn_attention_backward", &of_cudnn_backward);
}

} // namespace simulated::meanings
