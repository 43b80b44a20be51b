// What one operator reads, writes and moves, for a timeline. The operators fill it while they run.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

// True while launches are being recorded. Can be asked at any time; the recorder sets it.
bool is_recording();
void set_recording(bool on);
// Work is noted also where this says so: for launches that are captured, which may be recorded later.
void note_also_where(bool (*asks)());

// CPU time of the calling thread, in seconds.
double thread_seconds();

// Made where the operator begins. Unless launches are being recorded or captured, its functions do nothing.
class Work {
 public:
  struct Copy {
    c10::DeviceIndex source; // -1 is the host
    c10::DeviceIndex target;
  };

  Work();
  // The same work, begun by this thread now.
  Work again() const;

  // Keeps the arguments if FLOPs are computed from them. To be called before any of them is replaced.
  void called(const c10::OperatorHandle& op, const c10::IValue* arguments);
  void argument(const at::Tensor& tensor, bool reads, bool writes);
  // The operator has allocated and written a block of memory.
  void made(size_t bytes);
  void returned(c10::ArrayRef<c10::IValue> values);
  // The operator copies elements to `to`, or one element to a number if `to` is not defined.
  void copied(const char* op, const at::Tensor& from, const at::Tensor& to);
  // The launch copies bytes from one place to another. A place is a device, or -1 for the host.
  void moved(const char* op, size_t bytes, int from, int to);
  // A kernel on `device` accesses bytes of `owner`'s memory by itself. -1 is the host.
  void accessed(int device, int owner, size_t bytes, bool writes);
  // The operator copies bytes to other memory of the same tensor.
  void resized(const char* op, size_t bytes);

  bool is_recorded;
  double begun = 0; // CPU time of the thread
  std::string op;
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  c10::ScalarType dtype = c10::ScalarType::Byte; // of the largest tensor
  c10::SmallVector<int64_t, 12> shapes; // for each tensor argument the number of its dimensions, then its sizes
  std::optional<Copy> copy;
  // What a kernel itself moves from and to other places, and how many bytes.
  c10::SmallVector<std::pair<Copy, uint64_t>, 2> peers;

  // For operators with a formula for FLOPs: arguments and results, with a tuple of sizes for each tensor.
  bool has_formula = false;
  std::vector<c10::IValue> positional;
  std::vector<std::pair<std::string, c10::IValue>> keywords;
  std::vector<c10::IValue> results;

 private:
  void touches(const at::Tensor& tensor, uint64_t bytes);
  void looks_at(const c10::IValue& value);

  uint64_t largest_ = 0;
};

// Names the operators whose arguments are kept. Until the first call, what is captured keeps those of all.
void keep_arguments_of(const std::vector<std::string>& operators);
bool keeps_arguments_of(const std::string& op);

} // namespace simulated
