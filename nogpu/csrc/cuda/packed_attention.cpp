// The kernels of attention below the fused ones, which nested tensors and libraries call: (batch, sequence, heads,
// features), or sequences of several lengths one behind the other, with the places where they begin and end.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "attention.h"
#include "meanings.h"

namespace simulated::meanings {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using OptInt = std::optional<int64_t>;
using Scale = std::optional<double>;

bool has(const OptTensor& tensor) {
  return tensor && tensor->defined();
}

// A part of the queries, keys and values that belong together, heads first.
struct Group {
  Tensor query, key, value, bias;
};

Tensor heads_first(const Tensor& tensor) {
  return tensor.transpose(-3, -2);
}

// From (sequence, heads, features). `ends` has one place more than there are sequences.
Tensor sequence(const Tensor& tensor, const Tensor& ends, int64_t index) {
  const auto places = ends.to(c10::kLong);
  const auto begin = places[index].item<int64_t>();
  return tensor.narrow(0, begin, places[index + 1].item<int64_t>() - begin);
}

// Calls `work(group, index)` for each sequence of its own length.
template <class Work>
void for_each_sequence(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_ends,
                       const Tensor& key_ends, const Work& work) {
  for (int64_t i = 0; i + 1 < query_ends.numel(); ++i) {
    work(Group{heads_first(sequence(query, query_ends, i)), heads_first(sequence(key, key_ends, i)),
               heads_first(sequence(value, key_ends, i)), {}}, i);
  }
}

struct Packed {
  std::vector<Tensor> outputs, sums; // (sequence, heads, features), (heads, sequence)
};

Packed attend_packed(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_ends,
                     const Tensor& key_ends, const Rules& rules, int64_t seed) {
  auto generator = drawn_from_seed(seed);
  Packed packed;
  for_each_sequence(query, key, value, query_ends, key_ends, [&](const Group& group, int64_t) {
    const auto attended = attend(group.query, group.key, group.value, {}, rules, generator);
    packed.outputs.push_back(heads_first(attended.output));
    packed.sums.push_back(attended.logsumexp);
  });
  return packed;
}

// `sums_of(index, queries)` are (heads, queries).
template <class Sums>
std::tuple<Tensor, Tensor, Tensor> attend_packed_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                          const Tensor& value, const Tensor& output,
                                                          const Tensor& query_ends, const Tensor& key_ends,
                                                          const Rules& rules, int64_t seed, const Sums& sums_of) {
  auto generator = drawn_from_seed(seed);
  std::vector<Tensor> queries, keys, values;
  for_each_sequence(query, key, value, query_ends, key_ends, [&](const Group& group, int64_t i) {
    const Attended attended{heads_first(sequence(output, query_ends, i)), sums_of(i, group.query.size(-2))};
    const auto slope = heads_first(sequence(grad, query_ends, i));
    const auto grads = attend_backward(slope, group.query, group.key, group.value, {}, attended, rules, generator);
    queries.push_back(heads_first(grads.query));
    keys.push_back(heads_first(grads.key));
    values.push_back(heads_first(grads.value));
  });
  return {at::cat(queries), at::cat(keys), at::cat(values)};
}

// ---- flash attention

Rules flash_rules(const Tensor& query, Scale scale, bool is_causal, double dropout, OptInt left, OptInt right) {
  return {scale_of(scale, query), is_causal ? Causal::from_bottom_right : Causal::no, dropout, left.value_or(-1),
          right.value_or(-1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& query_ends, const OptTensor& key_ends,
    int64_t, int64_t, double dropout, bool is_causal, bool, Scale scale, OptInt left, OptInt right,
    const OptTensor& used, const OptTensor& slopes, const OptTensor& blocks, OptInt) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has(used) && !has(slopes) && !has(blocks),
                              "aten::_flash_attention_forward with seqused_k, alibi_slopes or block_table: the stand-in "
                              "for CUDA computes it without them");
  const auto seed = next_seed(query, dropout);
  const auto rules = flash_rules(query, scale, is_causal, dropout, left, right);
  auto state = at::zeros({2}, at::TensorOptions().dtype(c10::kUInt64));
  state.mutable_data_ptr<uint64_t>()[0] = static_cast<uint64_t>(seed);
  const auto nothing = at::empty({0}, query.options());
  if (has(query_ends)) {
    const auto packed = attend_packed(query, key, value, *query_ends, *key_ends, rules, seed);
    return {at::cat(packed.outputs), at::cat(packed.sums, 1), state, nothing, nothing};
  }
  auto generator = drawn_from_seed(seed);
  const auto attended = attend(heads_first(query), heads_first(key), heads_first(value), {}, rules, generator);
  return {heads_first(attended.output).contiguous(), attended.logsumexp, state, nothing, nothing};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                  const Tensor& value, const Tensor& output, const Tensor& sums,
                                                  const Tensor& query_ends, const Tensor& key_ends, int64_t, int64_t,
                                                  double dropout, bool is_causal, const Tensor& state, const Tensor&,
                                                  Scale scale, OptInt left, OptInt right) {
  const auto seed = dropout == 0 ? 0 : static_cast<int64_t>(state.const_data_ptr<uint64_t>()[0]);
  const auto rules = flash_rules(query, scale, is_causal, dropout, left, right);
  if (query_ends.defined()) {
    const auto places = query_ends.to(c10::kLong);
    return attend_packed_backward(grad, query, key, value, output, query_ends, key_ends, rules, seed,
                                  [&](int64_t i, int64_t queries) {
                                    return sums.narrow(1, places[i].item<int64_t>(), queries);
                                  });
  }
  auto generator = drawn_from_seed(seed);
  const auto grads = attend_backward(heads_first(grad), heads_first(query), heads_first(key), heads_first(value), {},
                                     {heads_first(output), sums}, rules, generator);
  return {heads_first(grads.query).contiguous(), heads_first(grads.key).contiguous(),
          heads_first(grads.value).contiguous()};
}

// ---- memory-efficient attention

Rules efficient_rules(const Tensor& query, Scale scale, int64_t mask, double dropout, OptInt window) {
  TORCH_CHECK_NOT_IMPLEMENTED(!window || *window <= 0,
                              "aten::_efficient_attention_forward with window_size: the stand-in for CUDA computes it "
                              "without a window");
  const auto causal = mask == 0 ? Causal::no : mask == 1 ? Causal::from_top_left : Causal::from_bottom_right;
  return {scale_of(scale, query), causal, dropout};
}

Tensor padded(const Tensor& sums, int64_t queries) {
  auto shape = sums.sizes().vec();
  shape.back() = (queries + 31) / 32 * 32;
  auto result = at::full(shape, std::numeric_limits<double>::infinity(), sums.options());
  result.narrow(-1, 0, sums.size(-1)).copy_(sums);
  return result;
}

Tensor number(int64_t value) {
  return at::scalar_tensor(value, at::TensorOptions().dtype(c10::kLong));
}

// Sequences of their own lengths are one batch.
std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t> efficient(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& bias, const OptTensor& query_ends,
    const OptTensor& key_ends, OptInt longest_query, OptInt longest_key, double dropout, int64_t mask, bool, Scale scale,
    const OptTensor& used, OptInt window) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has(used) && !(has(bias) && has(query_ends)),
                              "aten::_efficient_attention_forward with seqlen_k, or with a bias for sequences of their "
                              "own lengths: the stand-in for CUDA computes it without them");
  const auto seed = next_seed(query, dropout);
  const auto rules = efficient_rules(query, scale, mask, dropout, window);
  if (has(query_ends)) {
    const auto packed = attend_packed(query[0], key[0], value[0], *query_ends, *key_ends, rules, seed);
    std::vector<Tensor> sums;
    for (const auto& part : packed.sums) {
      sums.push_back(padded(part, *longest_query).unsqueeze(0));
    }
    return {at::cat(packed.outputs).unsqueeze(0), at::cat(sums), number(seed), number(0), *longest_query,
            longest_key.value_or(*longest_query)};
  }
  auto generator = drawn_from_seed(seed);
  const auto attended =
      attend(heads_first(query), heads_first(key), heads_first(value), bias.value_or(Tensor()), rules, generator);
  return {heads_first(attended.output).contiguous(), padded(attended.logsumexp, query.size(1)), number(seed), number(0),
          query.size(1), key.size(1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& bias,
    const Tensor& output, const OptTensor& query_ends, const OptTensor& key_ends, int64_t, int64_t, const Tensor& sums,
    double dropout, const Tensor& seed, const Tensor&, int64_t mask, bool of_bias, Scale scale, OptInt, OptInt window,
    bool) {
  const auto rules = efficient_rules(query, scale, mask, dropout, window);
  if (has(query_ends)) {
    auto [q, k, v] = attend_packed_backward(grad[0], query[0], key[0], value[0], output[0], *query_ends, *key_ends,
                                            rules, seed.item<int64_t>(), [&](int64_t i, int64_t queries) {
                                              return sums[i].narrow(-1, 0, queries);
                                            });
    return {q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), Tensor()};
  }
  auto generator = drawn_from_seed(seed.item<int64_t>());
  const auto grads = attend_backward(heads_first(grad), heads_first(query), heads_first(key), heads_first(value),
                                     bias.value_or(Tensor()),
                                     {heads_first(output), sums.narrow(-1, 0, query.size(1))}, rules, generator);
  return {heads_first(grads.query).contiguous(), heads_first(grads.key).contiguous(),
          heads_first(grads.value).contiguous(), of_bias ? grads.bias : Tensor()};
}

} // namespace

void add_packed_attention(torch::Library& library) {
  add(library, "_flash_attention_forward", &flash);
  add(library, "_flash_attention_backward", &flash_backward);
  add(library, "_efficient_attention_forward", &efficient);
  add(library, "_efficient_attention_backward", &efficient_backward);
}

} // namespace simulated::meanings
