// What is known about an operator before it is called: the arguments that matter to a device, and how they are used. A
// plan is made once for each operator, so that a call compares no names, searches no tags and reads no schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace simulated {

// An argument that may hold tensors, a device or a generator.
struct ArgumentPlan {
  const char* name; // in the schema
  uint32_t index;
  bool is_read; // otherwise it is written, or is the base of a view
  bool says_it_writes;
  bool is_written_unsaid; // although the schema does not say so
  bool is_written_in_training; // a running average of a normalisation
  bool may_be_on_the_cpu;
  bool draws_by_default; // an optional generator: the device's default one if none is passed
  bool selects; // a mask in it makes the size of the result depend on values
  bool is_overwritten; // written without being read
};

struct OperatorPlan {
  explicit OperatorPlan(c10::OperatorHandle op);
  // The same for an operator without a kernel of the CPU, which this function on tensors of the CPU takes the place of.
  OperatorPlan(c10::OperatorHandle op, c10::KernelFunction kernel);

  // Runs it on tensors of the CPU.
  void call(torch::jit::Stack* stack) const {
    kernel.isValid() ? kernel.callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::CPU), stack) : op.callBoxed(stack);
  }

  // True if the host waits for values of the device in a call with these arguments.
  bool waits(const c10::IValue* arguments) const {
    return waits_for_values || (waits_on_gpu != nullptr && waits_on_gpu(arguments));
  }

  // The argument `training` of a normalisation: (input, weight, bias, mean, variance, training, ...).
  static constexpr size_t kTraining = 5;

  c10::OperatorHandle op;
  c10::KernelFunction kernel; // invalid if the CPU has one
  size_t arguments; // how many the schema has
  size_t returns;
  std::vector<ArgumentPlan> places; // in the order of the schema
  std::optional<size_t> dropout; // the argument that lets it draw, if it has no generator to draw from
  // False for operators that quantise, because torch's meta kernels make tensors that are not; and for those of other
  // libraries, whose kernels may be Python.
  bool can_wait;
  bool waits_for_values; // the size of the result depends on values, so the host waits for them
  // Whether CUDA's kernel waits in a call with these arguments, although the shapes are known. Null if it never does.
  bool (*waits_on_gpu)(const c10::IValue* arguments);
  // The operator reads and writes no elements. It allocates memory, makes views, or reads or changes a shape.
  bool leaves_elements_alone;
  // The operator answers from shapes and settings alone, and the answer is that of the CPU's kernel.
  bool asks_about_shapes;
};

} // namespace simulated
