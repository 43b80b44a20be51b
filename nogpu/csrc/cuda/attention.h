// Attention as CUDA's fused kernels compute it, on tensors of the CPU whose last two dimensions are the sequence and the
// features, and the one before them the heads. fused_attention.cpp and packed_attention.cpp make operators of it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace simulated::meanings {

// Where the mask of a causal attention begins if there are more keys than queries, or fewer.
enum class Causal { no, from_top_left, from_bottom_right };

struct Rules {
  double scale = 1;
  Causal causal = Causal::no;
  double dropout = 0;
  int64_t left = -1;  // a window of so many keys before the query's place; all if negative
  int64_t right = -1; // and after it
};

// Numbers are drawn from a seed that forwards keeps for backwards.
at::Generator drawn_from_seed(int64_t seed);
// 0 without dropout, and where only shapes are asked for.
int64_t next_seed(const at::Tensor& query, double dropout);

struct Attended {
  at::Tensor output;
  at::Tensor logsumexp; // (..., heads, queries)
};
struct Gradients {
  at::Tensor query, key, value;
  at::Tensor bias; // undefined without a bias
};

Attended attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
                const Rules& rules, at::Generator& generator);
Gradients attend_backward(const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const at::Tensor& bias, const Attended& attended, const Rules& rules,
                          at::Generator& generator);

// The scale if none is given.
double scale_of(std::optional<double> scale, const at::Tensor& query);

} // namespace simulated::meanings
