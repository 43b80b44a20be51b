// Operators that have no kernel of the CPU, or one that means something else, composed of operators that have.
#include <ATen/core/Tensor.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "keys.h"
#include "register.h"

namespace simulated {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

// ---- dropout: the CPU's operator draws without a generator argument

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true)) {
    return {input.clone(), at::empty_like(input, input.options().dtype(c10::kBool)).fill_(true)};
  }
  auto mask = at::empty_like(input, input.options().dtype(c10::kBool));
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// ---- recurrent cells: torch calls fused ones on every accelerator. These are composed of differentiable operators.

Tensor with_bias(const Tensor& gates, const OptTensor& bias) {
  return bias && bias->defined() ? gates.add(*bias) : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const OptTensor& input_bias, const OptTensor& hidden_bias) {
  const auto gates = with_bias(input_gates, input_bias).add(with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto cy = gates[1].sigmoid().mul(cx).add(gates[0].sigmoid().mul(gates[2].tanh()));
  const auto hy = gates[3].sigmoid().mul(cy.tanh());
  return {hy, cy, at::empty({0}, cx.options())};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const OptTensor& input_bias, const OptTensor& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = hidden[0].add(input[0]).sigmoid();
  const auto update = hidden[1].add(input[1]).sigmoid();
  const auto fresh = input[2].add(hidden[2].mul(reset)).tanh();
  return {hx.sub(fresh).mul(update).add(fresh), at::empty({0}, hx.options())};
}

} // namespace

void register_composed() {
  static torch::Library library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  library.impl("native_dropout", TORCH_FN(native_dropout));
  static torch::Library with_autograd(torch::Library::IMPL, "aten", kAutogradKey, __FILE__, __LINE__);
  for (auto* each : {&library, &with_autograd}) {
    each->impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
    each->impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  }
}

} // namespace simulated
