// A kernel that reads the memory of peers: one launch that copies or adds stretches of memory of several devices.
#include "rows.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/OpMathType.h>

#include <cstring>

#include "clocks.h"
#include "counts.h"
#include "current.h"
#include "on_cpu.h"
#include "skipped.h"

namespace simulated {
namespace {

// A row: the number of the target, its first element, how many elements; then for each term its number and first element.
constexpr int64_t kTarget = 0, kFirst = 1, kNumel = 2, kTerms = 3;

class Rows {
 public:
  Rows(const at::Tensor& rows, const std::vector<std::optional<at::Tensor>>& tensors, const std::vector<int64_t>& shifts)
      : rows_(rows), tensors_(tensors), shifts_(shifts), width_(rows.size(1)) {
    TORCH_CHECK(rows.scalar_type() == at::kLong && rows.is_cpu() && rows.is_contiguous() && rows.dim() == 2 &&
                    width_ > kTerms && (width_ - kTerms) % 2 == 0,
                "rows are a contiguous int64 matrix on the CPU, with a target and at least one term in each row");
    TORCH_CHECK(shifts.empty() || shifts.size() == tensors.size(), "one shift for each tensor");
  }

  int64_t count() const { return rows_.size(0); }
  int64_t terms() const { return (width_ - kTerms) / 2; }
  int64_t numel(int64_t row) const { return at(row, kNumel); }
  const at::Tensor* target(int64_t row) const { return tensor(at(row, kTarget)); }
  const at::Tensor* term(int64_t row, int64_t number) const { return tensor(at(row, kTerms + 2 * number)); }
  char* target_memory(int64_t row) const { return memory(at(row, kTarget), at(row, kFirst)); }
  const char* term_memory(int64_t row, int64_t number) const {
    return memory(at(row, kTerms + 2 * number), at(row, kTerms + 2 * number + 1));
  }

 private:
  int64_t at(int64_t row, int64_t column) const { return rows_.const_data_ptr<int64_t>()[row * width_ + column]; }
  const at::Tensor* tensor(int64_t number) const {
    const auto& found = tensors_.at(static_cast<size_t>(number));
    return found ? &*found : nullptr;
  }
  char* memory(int64_t number, int64_t first) const {
    const auto& found = *tensors_[static_cast<size_t>(number)];
    const auto shift = shifts_.empty() ? 0 : shifts_[static_cast<size_t>(number)];
    return static_cast<char*>(found.mutable_data_ptr()) + (shift + first) * found.element_size();
  }

  const at::Tensor& rows_;
  const std::vector<std::optional<at::Tensor>>& tensors_;
  const std::vector<int64_t>& shifts_;
  int64_t width_;
};

template <typename Term, typename Sum, typename Result>
void add(const Rows& rows, int64_t row, const std::vector<int64_t>& present) {
  auto* results = reinterpret_cast<Result*>(rows.target_memory(row));
  std::vector<const Term*> terms;
  for (const auto number : present) {
    terms.push_back(reinterpret_cast<const Term*>(rows.term_memory(row, number)));
  }
  // A target may be one of its own terms, so an element is read from all terms before it is written.
  for (int64_t i = 0, numel = rows.numel(row); i < numel; ++i) {
    auto sum = static_cast<Sum>(terms[0][i]);
    for (size_t number = 1; number < terms.size(); ++number) {
      sum = static_cast<Sum>(sum + static_cast<Sum>(terms[number][i]));
    }
    results[i] = static_cast<Result>(sum);
  }
}

void run(const Rows& rows, int64_t row, const std::vector<int64_t>& present) {
  const auto& target = *rows.target(row);
  const auto dtype = rows.term(row, present[0])->scalar_type();
  if (present.size() == 1 && dtype == target.scalar_type()) {
    std::memcpy(rows.target_memory(row), rows.term_memory(row, present[0]),
                static_cast<size_t>(rows.numel(row)) * target.element_size());
    return;
  }
  AT_DISPATCH_V2(dtype, "launch_rows", AT_WRAP([&] {
    using Sum = at::opmath_type<scalar_t>;
    if (target.scalar_type() == dtype) {
      add<scalar_t, Sum, scalar_t>(rows, row, present);
    } else {
      TORCH_CHECK(target.scalar_type() == c10::CppTypeToScalarType<Sum>::value,
                  "sums of ", dtype, " are of that dtype or of the one they are added in; got ", target.scalar_type());
      add<scalar_t, Sum, Sum>(rows, row, present);
    }
  }), AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX), at::kHalf, at::kBFloat16, at::kBool);
}

} // namespace

void launch_rows(const std::string& name, const at::Tensor& table, const std::vector<std::optional<at::Tensor>>& tensors,
                 const std::vector<int64_t>& shifts) {
  const Rows rows(table, tensors, shifts);
  if (rows.count() == 0) {
    return;
  }
  TORCH_CHECK(rows.target(0), "each row has a target");
  const auto device = rows.target(0)->device();
  const auto stream = current_stream(device);
  std::vector<std::vector<int64_t>> present(static_cast<size_t>(rows.count()));
  c10::SmallVector<Touch, 16> touches;
  std::vector<const void*> seen; // a tensor may be in many rows
  auto touch = [&](const at::Tensor& tensor, bool write) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (std::find(seen.begin(), seen.end(), impl) == seen.end()) {
      seen.push_back(impl);
      add_touch(touches, tensor, write, write ? "target" : "term");
    }
  };
  Work work;
  work.moved(name.c_str(), 0, device.index(), device.index());
  for (int64_t row = 0; row < rows.count(); ++row) {
    TORCH_CHECK(rows.target(row) && rows.target(row)->device() == device, "all targets are on one device");
    const auto bytes = static_cast<size_t>(rows.numel(row)) * rows.target(row)->element_size();
    for (int64_t number = 0; number < rows.terms() && bytes; ++number) {
      if (const auto* term = rows.term(row, number)) {
        present[static_cast<size_t>(row)].push_back(number);
        touch(*term, false);
        work.accessed(device.index(), term->device().index(),
                      static_cast<size_t>(rows.numel(row)) * term->element_size(), false);
      }
    }
    if (!present[static_cast<size_t>(row)].empty()) {
      touch(*rows.target(row), true);
      work.accessed(device.index(), device.index(), bytes, true);
    }
  }
  const auto ticket = clocks::launch(stream, name, touches);
  for (int64_t row = 0; row < rows.count(); ++row) {
    const auto& numbers = present[static_cast<size_t>(row)];
    if (!numbers.empty() && !skipped::on()) {
      run(rows, row, numbers);
    }
    for (const auto number : numbers) {
      const auto& term = *rows.term(row, number);
      counts::copied(term.device().index(), device.index(), static_cast<uint64_t>(rows.numel(row)) * term.element_size());
    }
  }
  counts::launched(device.index());
  clocks::done(ticket, std::move(work));
}

} // namespace simulated
