#include "host.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "clocks.h"
#include "front.h"
#include "on_cpu.h"
#include "operator_plan.h"
#include "process_state.h"
#include "stacks.h"

namespace simulated {
namespace {

struct State {
  std::mutex mutex;
  std::unordered_map<c10::OperatorName, std::shared_ptr<const OperatorPlan>> plans; // null: reads and writes nothing
  std::string problem;
};

// These look at no element themselves: `copy_` follows for those that copy.
bool leaves_memory_alone(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> names = {"aten::_to_copy", "aten::_pin_memory", "aten::is_pinned"};
  const auto& name = op.operator_name().name;
  return names.count(name) > 0 || (name != "aten::copy_" && !op.hasKernelForDispatchKey(c10::DispatchKey::CPU));
}

std::shared_ptr<const OperatorPlan> plan_of(const c10::OperatorName& name) {
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (const auto found = s.plans.find(name); found != s.plans.end()) {
    return found->second;
  }
  const auto op = c10::Dispatcher::singleton().findOp(name);
  std::shared_ptr<const OperatorPlan> plan;
  if (op && op->hasSchema() && !leaves_memory_alone(*op)) {
    plan = std::make_shared<const OperatorPlan>(*op);
  }
  return s.plans[name] = plan;
}

// Adds what the argument touches. Returns false for tensors of a device: then it is no operator of the host.
bool add(c10::SmallVectorImpl<Touch>& touches, const c10::IValue& value, const ArgumentPlan& place) {
  if (value.isTensorList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (!add(touches, element, place)) {
        return false;
      }
    }
    return true;
  }
  if (!value.isTensor() || !value.toTensor().defined()) {
    return true;
  }
  const auto& tensor = value.toTensor();
  if (!tensor.is_cpu()) {
    return false;
  }
  if (tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.unsafeGetTensorImpl()->has_storage() &&
      (place.is_read || place.says_it_writes)) {
    add_touch(touches, tensor, place.says_it_writes, place.name);
  }
  return true;
}

// Operators of a device run on the CPU too, in the device's memory: those are looked at elsewhere.
std::string of_host(const std::string& op, c10::SmallVectorImpl<Touch>& touches) {
  touches.erase(std::remove_if(touches.begin(), touches.end(), [](const Touch& touch) { return touch.block->device >= 0; }),
                touches.end());
  return touches.empty() ? "" : clocks::host_touches(op, touches);
}

std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  const auto plan = name ? plan_of(*name) : nullptr;
  if (!plan || plan->leaves_elements_alone) {
    return nullptr;
  }
  c10::SmallVector<Touch, 4> touches;
  const auto inputs = call.inputs();
  for (const auto& place : plan->places) {
    if (place.index < inputs.size() && !add(touches, inputs[place.index], place)) {
      return nullptr;
    }
  }
  if (touches.empty()) {
    return nullptr;
  }
  auto problem = of_host(plan->op.operator_name().name, touches);
  if (!problem.empty()) {
    const auto stack = read_stack();
    problem += stack.empty() ? "" : "\nThe host's access is here:\n" + stack;
    keep_host_problem(std::move(problem));
  }
  return nullptr;
}

} // namespace

void watch_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(&look).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

void host_reads(const at::Tensor& tensor, const std::string& op) {
  if (!tensor.is_cpu() || tensor.layout() != c10::kStrided || tensor.numel() == 0) {
    return;
  }
  c10::SmallVector<Touch, 4> touches;
  add_touch(touches, tensor, false, "self");
  const auto problem = of_host(op, touches);
  TORCH_CHECK(problem.empty(), problem);
}

void keep_host_problem(std::string problem) {
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.problem.empty()) {
    s.problem = std::move(problem);
  }
}

std::string take_host_problem() {
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return std::exchange(s.problem, "");
}

} // namespace simulated
