#include <ATen/core/Tensor.h>

#include <algorithm>

#include "memory.h"
#include "on_cpu.h"

namespace simulated {
namespace {

// The byte spans of a strided tensor: exactly for dense ones and for up to 64 runs, the whole extent otherwise.
void add_spans(c10::SmallVectorImpl<Span>& spans, const at::Tensor& tensor, size_t offset) {
  constexpr int64_t kRuns = 64;
  const auto item = static_cast<int64_t>(tensor.element_size());
  auto push = [&](int64_t begin, int64_t elements) {
    const auto from = offset + static_cast<size_t>(begin * item);
    spans.push_back({from, from + static_cast<size_t>(elements * item)});
  };
  if (tensor.is_non_overlapping_and_dense()) {
    push(0, tensor.numel());
    return;
  }
  c10::SmallVector<std::pair<int64_t, int64_t>, 6> dims; // stride, size; expanded ones touch nothing more
  int64_t extent = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) > 0) {
      dims.emplace_back(tensor.stride(i), tensor.size(i));
      extent += (tensor.size(i) - 1) * tensor.stride(i);
    }
  }
  std::sort(dims.begin(), dims.end());
  size_t outer = 0;
  int64_t run = 1;
  while (outer < dims.size() && dims[outer].first <= run) {
    run += (dims[outer].second - 1) * dims[outer].first;
    ++outer;
  }
  int64_t runs = 1;
  for (size_t i = outer; i < dims.size(); ++i) {
    runs *= dims[i].second;
  }
  if (runs > kRuns) {
    push(0, extent);
    return;
  }
  for (int64_t i = 0; i < runs; ++i) {
    int64_t rest = i, begin = 0;
    for (size_t d = outer; d < dims.size(); ++d) {
      begin += rest % dims[d].second * dims[d].first;
      rest /= dims[d].second;
    }
    push(begin, run);
  }
}

} // namespace

void add_touch(c10::SmallVectorImpl<Touch>& touches, const at::Tensor& tensor, bool write, const char* argument) {
  if (tensor.numel() == 0) {
    return;
  }
  const auto& data = tensor.storage().data_ptr();
  auto* block = tensor.device().type() == c10::kPrivateUse1 ? memory::block_of(data) : memory::pinned_block_of(data.get());
  if (block) {
    const auto into_block = static_cast<const char*>(data.get()) - static_cast<const char*>(block->data);
    const auto into_storage = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
    Touch touch{block, {}, write, argument};
    add_spans(touch.spans, tensor, static_cast<size_t>(into_block + into_storage));
    touches.push_back(std::move(touch));
  }
}

} // namespace simulated
