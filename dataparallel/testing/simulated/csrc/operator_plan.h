// What is known of an operator before it is called: which arguments matter to a device and what is done with them, so
// that a call compares no names, searches no tags and walks no schema. Made once for an operator; knows no tensor.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <vector>

namespace simulated {

// An argument that may hold tensors, say a device or draw numbers.
struct ArgumentPlan {
  const char* name; // the schema's
  uint32_t index;
  bool is_read; // otherwise written, or the base of a view
  bool says_it_writes;
  bool is_written_unsaid; // although the schema says nothing
  bool is_written_in_training; // as running averages are
  bool may_be_on_the_cpu;
  bool draws_by_default; // a generator that nobody has to give
  bool selects; // a mask in it makes the size of the result depend on values
};

struct OperatorPlan {
  explicit OperatorPlan(c10::OperatorHandle op);

  // The argument that says whether a normalisation is training: (input, weight, bias, mean, variance, training, ...).
  static constexpr size_t kTraining = 5;

  c10::OperatorHandle op;
  size_t arguments; // of the schema
  size_t returns;
  std::vector<ArgumentPlan> places; // in their order
  bool waits_for_values; // the size of the result depends on values, so that the host has waited for them
  // It reads and writes no element: it makes memory or views, says something of a tensor's shape, or changes that.
  bool leaves_elements_alone;
};

} // namespace simulated
