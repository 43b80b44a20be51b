#include "work.h"

#include <atomic>
#include <ctime>
#include <unordered_set>

#include "layouts.h"

namespace simulated {
namespace {

using Names = std::unordered_set<std::string>;

std::atomic<bool> recording{false};
std::atomic<const Names*> formulas{nullptr};
std::atomic<bool (*)()> is_noted_too{nullptr};

constexpr c10::DeviceIndex kHost = -1;

c10::DeviceIndex place(const at::Tensor& tensor) {
  return tensor.is_cpu() ? kHost : tensor.device().index();
}

uint64_t bytes_of(const at::Tensor& tensor, const std::string& op) {
  if (layouts::is_strided(tensor)) {
    return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
  }
  uint64_t bytes = 0;
  for (const auto& part : layouts::members(tensor, op)) {
    bytes += part.defined() ? bytes_of(part, op) : 0;
  }
  return bytes;
}

c10::IValue with_sizes(const c10::IValue& value) {
  if (value.isTensor()) {
    if (!value.toTensor().defined()) {
      return {};
    }
    std::vector<c10::IValue> sizes;
    for (const auto size : value.toTensor().sizes()) {
      sizes.emplace_back(size);
    }
    return c10::ivalue::Tuple::create(std::move(sizes));
  }
  if (value.isTensorList() || value.isOptionalTensorList()) {
    auto list = c10::impl::GenericList(c10::AnyType::get());
    for (const c10::IValue& element : value.toListRef()) {
      list.push_back(with_sizes(element));
    }
    return list;
  }
  return value;
}

} // namespace

bool is_recording() {
  return recording.load(std::memory_order_relaxed);
}

void set_recording(bool on) {
  recording = on;
}

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void keep_arguments_of(const std::vector<std::string>& operators) {
  Names names(operators.begin(), operators.end());
  const auto* before = formulas.load();
  if (!before || *before != names) {
    formulas = new Names(std::move(names)); // the former ones stay: an operator may be reading them
  }
}

bool keeps_arguments_of(const std::string& op) {
  const auto* names = formulas.load();
  return !names || names->count(op) > 0;
}

void note_also_where(bool (*asks)()) {
  is_noted_too = asks;
}

Work::Work() : is_recorded(is_recording()) {
  if (!is_recorded) {
    const auto asks = is_noted_too.load(std::memory_order_relaxed);
    is_recorded = asks && asks();
  }
  if (is_recorded) {
    begun = thread_seconds();
  }
}

Work Work::again() const {
  auto work = *this;
  work.begun = thread_seconds();
  return work;
}

void Work::called(const c10::OperatorHandle& handle, const c10::IValue* arguments) {
  if (!is_recorded) {
    return;
  }
  op = handle.operator_name().name;
  has_formula = keeps_arguments_of(op);
  if (!has_formula) {
    return;
  }
  for (const auto& argument : handle.schema().arguments()) {
    const auto& value = *arguments++;
    if (!argument.kwarg_only()) {
      positional.push_back(with_sizes(value));
    } else if (!argument.is_out()) {
      keywords.emplace_back(argument.name(), with_sizes(value));
    }
  }
}

void Work::argument(const at::Tensor& tensor, bool reads, bool writes) {
  if (!is_recorded) {
    return;
  }
  shapes.push_back(tensor.dim());
  shapes.append(tensor.sizes().begin(), tensor.sizes().end());
  const auto bytes = bytes_of(tensor, op);
  bytes_read += reads ? bytes : 0;
  bytes_written += writes ? bytes : 0;
  touches(tensor, bytes);
}

void Work::made(size_t bytes) {
  bytes_written += bytes;
}

void Work::returned(c10::ArrayRef<c10::IValue> values) {
  if (!is_recorded) {
    return;
  }
  for (const auto& value : values) {
    looks_at(value);
    if (has_formula) {
      results.push_back(with_sizes(value));
    }
  }
}

void Work::looks_at(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    touches(value.toTensor(), bytes_of(value.toTensor(), op));
  } else if (value.isTensorList()) {
    for (const c10::IValue& element : value.toListRef()) {
      looks_at(element);
    }
  }
}

void Work::touches(const at::Tensor& tensor, uint64_t bytes) {
  if (bytes > largest_) {
    largest_ = bytes;
    dtype = tensor.scalar_type();
  }
}

void Work::copied(const char* name, const at::Tensor& from, const at::Tensor& to) {
  if (!is_recorded) {
    return;
  }
  op = name;
  argument(from, true, false);
  const auto bytes = bytes_of(to.defined() ? to : from, op);
  bytes_written += bytes;
  if (to.defined()) {
    touches(to, bytes);
  }
  const auto source = place(from), target = to.defined() ? place(to) : kHost;
  if (source != target) {
    copy = {source, target};
  }
}

void Work::moved(const char* name, size_t bytes, int from, int to) {
  if (!is_recorded) {
    return;
  }
  resized(name, bytes);
  if (from != to) {
    copy = {static_cast<c10::DeviceIndex>(from), static_cast<c10::DeviceIndex>(to)};
  }
}

void Work::accessed(int device, int owner, size_t bytes, bool writes) {
  if (!is_recorded) {
    return;
  }
  if (device == owner) {
    (writes ? bytes_written : bytes_read) += bytes;
    return;
  }
  Copy ends{static_cast<c10::DeviceIndex>(owner), static_cast<c10::DeviceIndex>(device)};
  if (writes) {
    std::swap(ends.source, ends.target);
  }
  for (auto& [known, sum] : peers) {
    if (known.source == ends.source && known.target == ends.target) {
      sum += bytes;
      return;
    }
  }
  peers.emplace_back(ends, bytes);
}

void Work::resized(const char* name, size_t bytes) {
  if (!is_recorded) {
    return;
  }
  op = name;
  bytes_read += bytes;
  bytes_written += bytes;
}

} // namespace simulated
