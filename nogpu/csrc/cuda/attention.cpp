#include "attention.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>

#include <cmath>
#include <limits>

#include "front.h"

namespace simulated::meanings {
namespace {

using at::Tensor;

Tensor widened(const Tensor& tensor) {
  return tensor.to(at::toOpMathType(tensor.scalar_type()));
}

// Several heads of the query may share one of the key.
Tensor for_heads_of(const Tensor& query, const Tensor& key) {
  return query.size(-3) == key.size(-3) ? key : key.repeat_interleave(query.size(-3) / key.size(-3), -3);
}

Tensor of_shared_heads(const Tensor& grad, const Tensor& key) {
  if (grad.size(-3) == key.size(-3)) {
    return grad;
  }
  auto shape = grad.sizes().vec();
  const auto heads = shape.end() - 3;
  *heads = key.size(-3);
  shape.insert(heads + 1, grad.size(-3) / key.size(-3));
  return grad.reshape(shape).sum(-3);
}

// True where a query must not look at a key. Undefined if every one may.
Tensor forbidden(const Tensor& scores, const Rules& rules) {
  const auto queries = scores.size(-2), keys = scores.size(-1);
  const auto device = at::TensorOptions(scores.device());
  if (rules.causal == Causal::no && rules.left < 0 && rules.right < 0) {
    return {};
  }
  const auto shift = rules.causal == Causal::from_top_left ? 0 : keys - queries;
  const auto place = at::arange(queries, device).unsqueeze(1).add(shift);
  const auto key = at::arange(keys, device).unsqueeze(0);
  auto result = key.gt(place.add(keys + queries));
  result = rules.causal == Causal::no ? result : result.logical_or(key.gt(place));
  result = rules.left < 0 ? result : result.logical_or(key.lt(place.sub(rules.left)));
  return rules.right < 0 ? result : result.logical_or(key.gt(place.add(rules.right)));
}

Tensor scores_of(const Tensor& query, const Tensor& key, const Tensor& bias, const Rules& rules) {
  auto scores = at::matmul(query, key.transpose(-2, -1)).mul_(rules.scale);
  if (bias.defined()) {
    scores.add_(bias);
  }
  const auto mask = forbidden(scores, rules);
  return mask.defined() ? scores.masked_fill_(mask, -std::numeric_limits<double>::infinity()) : scores;
}

// A query that may look at no key has no weights.
Tensor weights_of(const Tensor& scores, const Tensor& logsumexp) {
  return scores.sub(logsumexp.masked_fill(logsumexp.isinf(), 0).unsqueeze(-1)).exp_();
}

// What dropout multiplies the weights by. Undefined without dropout.
Tensor dropout_of(const Tensor& weights, const Rules& rules, at::Generator& generator) {
  if (rules.dropout == 0) {
    return {};
  }
  auto mask = at::empty(weights.sizes(), weights.options()).bernoulli_(1 - rules.dropout, generator);
  return rules.dropout == 1 ? mask : mask.mul_(1 / (1 - rules.dropout));
}

} // namespace

at::Generator drawn_from_seed(int64_t seed) {
  return at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
}

int64_t next_seed(const at::Tensor& query, double dropout) {
  if (dropout == 0 || query.is_meta()) {
    return 0;
  }
  return static_cast<int64_t>(front::drawn_from(front::default_generator(current_device().index())).current_seed());
}

double scale_of(std::optional<double> scale, const Tensor& query) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
}

Attended attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Rules& rules,
                at::Generator& generator) {
  const auto scores = scores_of(widened(query), widened(for_heads_of(query, key)), bias, rules);
  const auto logsumexp = scores.logsumexp(-1);
  auto weights = weights_of(scores, logsumexp);
  if (const auto dropout = dropout_of(weights, rules, generator); dropout.defined()) {
    weights.mul_(dropout);
  }
  return {at::matmul(weights, widened(for_heads_of(query, value))).to(query.scalar_type()), logsumexp};
}

Gradients attend_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                          const Tensor& bias, const Attended& attended, const Rules& rules, at::Generator& generator) {
  const auto q = widened(query), k = widened(for_heads_of(query, key)), v = widened(for_heads_of(query, value));
  const auto slope = widened(grad);
  const auto weights = weights_of(scores_of(q, k, bias, rules), attended.logsumexp);
  const auto dropout = dropout_of(weights, rules, generator);
  const auto dropped = dropout.defined() ? weights.mul(dropout) : weights;
  auto of_weights = at::matmul(slope, v.transpose(-2, -1));
  of_weights = dropout.defined() ? of_weights.mul_(dropout) : of_weights;
  const auto mean = slope.mul(widened(attended.output)).sum(-1, true);
  const auto of_scores = weights.mul(of_weights.sub_(mean));
  const auto of_key = at::matmul(of_scores.transpose(-2, -1), q).mul_(rules.scale);
  const auto of_value = at::matmul(dropped.transpose(-2, -1), slope);
  return {at::matmul(of_scores, k).mul_(rules.scale).to(query.scalar_type()),
          of_shared_heads(of_key, key).to(key.scalar_type()), of_shared_heads(of_value, value).to(value.scalar_type()),
          bias.defined() ? of_scores.sum_to_size(bias.sizes()).to(bias.scalar_type()) : Tensor()};
}

} // namespace simulated::meanings
