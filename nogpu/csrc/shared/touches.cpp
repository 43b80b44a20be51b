#include <ATen/core/Tensor.h>

#include <algorithm>

#include "front.h"
#include "on_cpu.h"

namespace simulated {
namespace {

// Adds the byte spans of a strided tensor. They are exact if the tensor is dense or has up to 64 runs. Otherwise they
// are one span, with its runs.
void add_spans(Touch& touch, const at::Tensor& tensor, size_t begin) {
  constexpr size_t kRuns = 64;
  const auto item = tensor.element_size();
  if (tensor.is_non_overlapping_and_dense()) {
    touch.spans.push_back({begin, begin + static_cast<size_t>(tensor.numel()) * item});
    return;
  }
  c10::SmallVector<std::pair<size_t, size_t>, 6> dims; // distance in bytes, size; expanded dimensions add no bytes
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) > 0) {
      dims.emplace_back(static_cast<size_t>(tensor.stride(i)) * item, static_cast<size_t>(tensor.size(i)));
    }
  }
  std::sort(dims.begin(), dims.end());
  Runs runs{begin, item, {}};
  size_t count = 1, extent = item;
  for (const auto& [distance, size] : dims) {
    extent += (size - 1) * distance;
    if (count == 1 && distance <= runs.length) {
      runs.length += (size - 1) * distance;
    } else {
      runs.steps.emplace_back(distance, size);
      count *= size;
    }
  }
  if (count > kRuns) {
    touch.spans.push_back({begin, begin + extent});
    touch.runs = std::make_shared<const Runs>(std::move(runs));
    return;
  }
  for (const auto& span : runs.spans()) {
    touch.spans.push_back(span);
  }
}

} // namespace

void add_touch(c10::SmallVectorImpl<Touch>& touches, const at::Tensor& tensor, bool write, const char* argument) {
  if (tensor.numel() == 0) {
    return;
  }
  const auto& data = tensor.storage().data_ptr();
  if (const auto place = front::place_of(data, tensor.device()); place.block) {
    const auto into_storage = static_cast<size_t>(tensor.storage_offset()) * tensor.element_size();
    Touch touch{place.block, {}, write, argument, nullptr};
    add_spans(touch, tensor, place.begin + into_storage);
    touches.push_back(std::move(touch));
  }
}

} // namespace simulated
