// Recurrent layers where torch has them of cuDNN, composed of differentiable operators: also torch's own way to cuDNN,
// which would ask cuDNN itself how it lays weights out.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/RNN.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/_use_cudnn_rnn_flatten_weight.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "keys.h"
#include "meanings.h"

namespace simulated::meanings {
namespace {

using at::Tensor;
using at::TensorList;
using OptTensor = std::optional<Tensor>;
using SymInts = c10::SymIntArrayRef;

// As cuDNN numbers them.
enum Mode : int64_t { kRelu, kTanh, kLstm, kGru };

// The weights of one direction of one layer.
struct Weights {
  explicit Weights(TensorList all) : of_input(all[0]), of_hidden(all[1]) {
    const bool has_biases = all.size() >= 4;
    if (has_biases) {
      input_bias = all[2];
      hidden_bias = all[3];
    }
    if (all.size() == 3 || all.size() == 5) {
      projection = all.back();
    }
  }
  Tensor of_input, of_hidden, input_bias, hidden_bias, projection;
};

struct State {
  Tensor h, c; // c for an LSTM only
};

// One step. `from_input` is what the input contributes to the gates.
State step(int64_t mode, const Tensor& from_input, const State& before, const Weights& weights) {
  const auto from_hidden = at::linear(before.h, weights.of_hidden, weights.hidden_bias);
  if (mode == kGru) {
    const auto input = from_input.chunk(3, 1), hidden = from_hidden.chunk(3, 1);
    const auto reset = hidden[0].add(input[0]).sigmoid();
    const auto update = hidden[1].add(input[1]).sigmoid();
    const auto fresh = input[2].add(hidden[2].mul(reset)).tanh();
    return {before.h.sub(fresh).mul(update).add(fresh), {}};
  }
  const auto sum = from_input.add(from_hidden);
  if (mode != kLstm) {
    return {mode == kRelu ? sum.relu() : sum.tanh(), {}};
  }
  const auto gates = sum.chunk(4, 1);
  const auto c = gates[1].sigmoid().mul(before.c).add(gates[0].sigmoid().mul(gates[2].tanh()));
  const auto h = gates[3].sigmoid().mul(c.tanh());
  return {weights.projection.defined() ? at::linear(h, weights.projection) : h, c};
}

State narrowed(const State& state, int64_t begin, int64_t count) {
  return {state.h.narrow(0, begin, count), state.c.defined() ? state.c.narrow(0, begin, count) : Tensor()};
}

State joined(const std::vector<State>& parts) {
  std::vector<Tensor> h, c;
  for (const auto& part : parts) {
    h.push_back(part.h);
    c.push_back(part.c);
  }
  return {at::cat(h), c[0].defined() ? at::cat(c) : Tensor()};
}

// The outputs of all steps, and the last state. Sequences end at different steps: the longest are first.
std::pair<Tensor, State> forwards(int64_t mode, const std::vector<Tensor>& inputs, const State& first,
                                  const Weights& weights) {
  std::vector<Tensor> outputs;
  std::vector<State> ended;
  auto state = first;
  for (const auto& input : inputs) {
    const auto count = input.size(0), before = state.h.size(0);
    if (count < before) {
      ended.insert(ended.begin(), narrowed(state, count, before - count));
      state = narrowed(state, 0, count);
    }
    state = step(mode, input, state, weights);
    outputs.push_back(state.h);
  }
  ended.insert(ended.begin(), state);
  return {at::cat(outputs), ended.size() == 1 ? state : joined(ended)};
}

std::pair<Tensor, State> backwards(int64_t mode, const std::vector<Tensor>& inputs, const State& first,
                                   const Weights& weights) {
  std::vector<Tensor> outputs(inputs.size());
  auto state = narrowed(first, 0, inputs.back().size(0));
  for (auto i = inputs.size(); i-- > 0;) {
    const auto count = inputs[i].size(0), before = state.h.size(0);
    if (count > before) {
      state = joined({state, narrowed(first, before, count - before)});
    }
    state = step(mode, inputs[i], state, weights);
    outputs[i] = state.h;
  }
  return {at::cat(outputs), state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rnn(
    const Tensor& input, TensorList weights, int64_t stride, const OptTensor&, const Tensor& hx, const OptTensor& cx,
    int64_t mode, c10::SymInt, c10::SymInt, int64_t layers, bool batch_first, double dropout, bool train,
    bool bidirectional, SymInts batch_sizes, const OptTensor&) {
  const bool packed = !batch_sizes.empty();
  const auto sequence = batch_first && !packed ? input.transpose(0, 1) : input;
  const auto sizes = packed ? C10_AS_INTARRAYREF_SLOW(batch_sizes).vec()
                            : std::vector<int64_t>(static_cast<size_t>(sequence.size(0)), sequence.size(1));
  auto steps = packed ? sequence : sequence.flatten(0, 1);
  const int64_t directions = bidirectional ? 2 : 1;
  std::vector<Tensor> hidden, cells;
  for (int64_t layer = 0; layer < layers; ++layer) {
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < directions; ++direction) {
      const auto index = layer * directions + direction;
      const Weights own(weights.slice(static_cast<size_t>(index * stride), static_cast<size_t>(stride)));
      const State first{hx[index], mode == kLstm ? (*cx)[index] : Tensor()};
      const auto inputs = at::linear(steps, own.of_input, own.input_bias).split_with_sizes(sizes);
      const auto [output, last] = direction == 0 ? forwards(mode, inputs, first, own) : backwards(mode, inputs, first, own);
      outputs.push_back(output);
      hidden.push_back(last.h);
      cells.push_back(last.c);
    }
    steps = directions == 1 ? outputs[0] : at::cat(outputs, 1);
    if (train && dropout > 0 && layer + 1 < layers) {
      steps = at::dropout(steps, dropout, true);
    }
  }
  auto output = packed ? steps : steps.unflatten(0, {sequence.size(0), sequence.size(1)});
  output = batch_first && !packed ? output.transpose(0, 1) : output;
  const auto nothing = at::empty({0}, hx.options());
  return {output, at::stack(hidden), mode == kLstm ? at::stack(cells) : nothing,
          at::empty({0}, hx.options().dtype(c10::kByte)), nothing};
}

// As torch casts the arguments for cuDNN.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> in_lower_precision(
    const Tensor& input, TensorList weights, int64_t stride, const OptTensor& buffer, const Tensor& hx,
    const OptTensor& cx, int64_t mode, c10::SymInt hidden_size, c10::SymInt proj_size, int64_t layers, bool batch_first,
    double dropout, bool train, bool bidirectional, SymInts batch_sizes, const OptTensor& dropout_state) {
  const c10::impl::ExcludeDispatchKeyGuard without(c10::autocast_dispatch_keyset);
  const auto type = at::autocast::get_autocast_dtype(kDevice);
  const auto lower = [type](const Tensor& tensor) { return at::autocast::cached_cast(type, tensor, kDevice); };
  std::vector<Tensor> cast;
  for (const auto& weight : weights) {
    cast.push_back(lower(weight));
  }
  return at::_cudnn_rnn_symint(lower(input), cast, stride, buffer, lower(hx), cx ? OptTensor(lower(*cx)) : cx, mode,
                               hidden_size, proj_size, layers, batch_first, dropout, train, bidirectional, batch_sizes,
                               dropout_state);
}

// All weights in one piece of memory, of which each becomes a view: matrices first, as cuDNN has them.
Tensor flatten_weights(TensorList weights, int64_t, c10::SymInt, int64_t, c10::SymInt, c10::SymInt, int64_t, bool,
                       bool) {
  std::vector<Tensor> ordered(weights.begin(), weights.end());
  std::stable_sort(ordered.begin(), ordered.end(), [](const Tensor& a, const Tensor& b) { return a.dim() > b.dim(); });
  std::vector<Tensor> flat;
  for (const auto& weight : ordered) {
    flat.push_back(weight.detach().reshape(-1));
  }
  const auto buffer = at::cat(flat);
  int64_t place = 0;
  for (auto& weight : ordered) {
    weight.set_(buffer.storage(), place, weight.sizes(), c10::contiguous_strides(weight.sizes()));
    place += weight.numel();
  }
  return buffer;
}

// ---- the way from torch's operators

bool are_in_one_piece(TensorList weights) {
  return std::all_of(weights.begin(), weights.end(), [&](const Tensor& weight) {
    return weight.storage().is_alias_of(weights[0].storage());
  });
}

void warn_of_pieces(TensorList weights) {
  if (!are_in_one_piece(weights)) {
    TORCH_WARN("RNN module weights are not part of single contiguous chunk of memory. This means they need to be "
               "compacted at every call, possibly greatly increasing memory usage. To compact weights again call "
               "flatten_parameters().");
  }
}

struct Layers {
  bool has_biases;
  int64_t count;
  double dropout;
  bool train, bidirectional, batch_first;
};

std::tuple<Tensor, Tensor, Tensor> call(int64_t mode, const Tensor& input, at::IntArrayRef batch_sizes, const Tensor& hx,
                                        const Tensor& cx, TensorList weights, const Layers& layers) {
  warn_of_pieces(weights);
  const int64_t projection = mode == kLstm && cx.size(2) != hx.size(2) ? hx.size(2) : 0;
  const int64_t hidden = mode == kLstm ? cx.size(2) : hx.size(2);
  const int64_t stride = (layers.has_biases ? 4 : 2) + (projection ? 1 : 0);
  const auto results = at::_cudnn_rnn(input, weights, stride, {}, hx, mode == kLstm ? OptTensor(cx) : OptTensor(), mode,
                                      hidden, projection, layers.count, layers.batch_first, layers.dropout, layers.train,
                                      layers.bidirectional, batch_sizes, {});
  return {std::get<0>(results), std::get<1>(results), std::get<2>(results)};
}

std::vector<int64_t> read(const Tensor& batch_sizes) {
  const auto* sizes = batch_sizes.const_data_ptr<int64_t>(); // in host memory on every device
  return {sizes, sizes + batch_sizes.numel()};
}

void lstm(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& input, TensorList hx, TensorList weights, bool biases,
          int64_t count, double dropout, bool train, bool bidirectional, bool batch_first) {
  std::tie(output, hy, cy) =
      call(kLstm, input, {}, hx[0], hx[1], weights, {biases, count, dropout, train, bidirectional, batch_first});
}

void packed_lstm(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& data, const Tensor& batch_sizes, TensorList hx,
                 TensorList weights, bool biases, int64_t count, double dropout, bool train, bool bidirectional) {
  std::tie(output, hy, cy) = call(kLstm, data, read(batch_sizes), hx[0], hx[1], weights,
                                  {biases, count, dropout, train, bidirectional, false});
}

template <int64_t mode>
void of_one_state(Tensor& output, Tensor& hy, const Tensor& input, const Tensor& hx, TensorList weights, bool biases,
                  int64_t count, double dropout, bool train, bool bidirectional, bool batch_first) {
  std::tie(output, hy, std::ignore) =
      call(mode, input, {}, hx, {}, weights, {biases, count, dropout, train, bidirectional, batch_first});
}

template <int64_t mode>
void packed_of_one_state(Tensor& output, Tensor& hy, const Tensor& data, const Tensor& batch_sizes, const Tensor& hx,
                         TensorList weights, bool biases, int64_t count, double dropout, bool train,
                         bool bidirectional) {
  std::tie(output, hy, std::ignore) =
      call(mode, data, read(batch_sizes), hx, {}, weights, {biases, count, dropout, train, bidirectional, false});
}

} // namespace

void replace_rnn() {
  using Key = c10::DispatchKey;
  for (const auto key : {kKey, Key::AutogradCUDA}) {
    static std::vector<std::unique_ptr<torch::Library>> libraries;
    libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
    libraries.back()->impl("_cudnn_rnn", TORCH_FN(rnn));
  }
  static torch::Library plain(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  plain.impl("_cudnn_rnn_flatten_weight", TORCH_FN(flatten_weights));
  static torch::Library cast(torch::Library::IMPL, "aten", Key::AutocastCUDA, __FILE__, __LINE__);
  cast.impl("_cudnn_rnn", TORCH_FN(in_lower_precision));

  at::native::lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm);
  at::native::lstm_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed_lstm);
  at::native::gru_cudnn_stub.set_cuda_dispatch_ptr(&of_one_state<kGru>);
  at::native::gru_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed_of_one_state<kGru>);
  at::native::rnn_tanh_cudnn_stub.set_cuda_dispatch_ptr(&of_one_state<kTanh>);
  at::native::rnn_tanh_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed_of_one_state<kTanh>);
  at::native::rnn_relu_cudnn_stub.set_cuda_dispatch_ptr(&of_one_state<kRelu>);
  at::native::rnn_relu_packed_cudnn_stub.set_cuda_dispatch_ptr(&packed_of_one_state<kRelu>);
}

} // namespace simulated::meanings
