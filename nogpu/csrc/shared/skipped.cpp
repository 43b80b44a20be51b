#include "skipped.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>

#include "layouts.h"

namespace simulated::skipped {
namespace {

constexpr uint64_t kFirstAddress = uint64_t{1} << 60; // far above what the host has, and positive as a signed number
constexpr uint64_t kAlignment = 512; // as CUDA's allocator

std::atomic<bool> is_on{false};
std::atomic<uint64_t> next_address{kFirstAddress};
thread_local bool is_in_kernel = false;

// Many meta kernels are Python functions. A block such as `with torch.device("sim:0")` that the user is in must not
// change the tensors that they make.
class InKernel {
 public:
  InKernel() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
    is_in_kernel = true;
  }
  ~InKernel() {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(before_);
    is_in_kernel = false;
  }
  InKernel(const InKernel&) = delete;
  InKernel& operator=(const InKernel&) = delete;

 private:
  const at::impl::TorchFunctionDisabledState before_;
};

[[noreturn]] void refuse_without_shapes(const std::string& name, const std::string& why) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "simulate(compute=False) takes shapes from meta kernels, and torch has none for ", name,
      ", or none that can do without values. If the operator is yours, register one with torch.library.register_fake; "
      "otherwise leave it out of what is planned, or simulate with compute=True. torch says: ", why);
}

// The Python error of the thread, if it is a NotImplementedError; it is cleared then. To be called with the GIL.
std::optional<std::string> take_not_implemented() {
  if (!PyErr_Occurred() || !PyErr_ExceptionMatches(PyExc_NotImplementedError)) {
    return std::nullopt;
  }
  const pybind11::error_already_set error; // fetches it
  return pybind11::str(error.value()).cast<std::string>();
}

// The operator of the same name in the namespace `sim_shapes`, if shapes.py has one: its results have the shapes of the
// CPU's kernel where those of torch's meta kernel differ.
c10::OperatorHandle with_shapes_of_the_cpu(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  const auto colons = name.name.find("::");
  const auto found =
      c10::Dispatcher::singleton().findSchema({"sim_shapes" + name.name.substr(colons), name.overload_name});
  return found ? *found : op;
}

void call_meta_kernel(const OperatorPlan& plan, torch::jit::Stack* stack) {
  const InKernel inside;
  if (plan.kernel.isValid()) {
    plan.kernel.callBoxed(plan.op, c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
  } else {
    with_shapes_of_the_cpu(plan.op).callBoxed(stack);
  }
}

} // namespace

bool on() {
  return is_on.load(std::memory_order_relaxed);
}

void skip_kernels() {
  is_on = true;
}

c10::DataPtr addresses(size_t bytes) {
  const auto length = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto* data = reinterpret_cast<void*>(next_address.fetch_add(length, std::memory_order_relaxed));
  return {data, data, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
}

at::Tensor without_value(const at::Tensor& tensor) {
  const c10::Device meta(c10::kMeta);
  c10::Storage nothing = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.element_size(),
      c10::DataPtr{nullptr, nullptr, &c10::detail::deleteNothing, meta}, c10::GetAllocator(c10::kMeta),
      /*resizable=*/false);
  auto result = layouts::strided(std::move(nothing), c10::DispatchKey::Meta, tensor);
  result.unsafeGetTensorImpl()->set_storage_offset(0);
  return result;
}

void call(const OperatorPlan& plan, torch::jit::Stack* stack, const std::string& name) {
  try {
    call_meta_kernel(plan, stack);
  } catch (const c10::NotImplementedError& error) {
    refuse_without_shapes(name, error.what_without_backtrace());
  } catch (const python_error&) {
    std::optional<std::string> why;
    {
      const pybind11::gil_scoped_acquire gil;
      why = take_not_implemented();
    }
    if (!why) {
      throw;
    }
    refuse_without_shapes(name, *why);
  }
}

bool answers(const OperatorPlan& plan, torch::jit::Stack* stack) {
  try {
    call_meta_kernel(plan, stack);
    return true;
  } catch (const python_error&) {
    const pybind11::gil_scoped_acquire gil;
    PyErr_Clear();
  } catch (const std::exception&) {
  }
  return false;
}

bool in_kernel() {
  return is_in_kernel;
}

void refuse(const std::string& what) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "simulate(compute=False) has no values, and ", what,
      " needs them. Leave it out of what is planned, or simulate with compute=True");
}

} // namespace simulated::skipped
