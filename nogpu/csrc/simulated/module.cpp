// The Python bindings. device_module.py makes `torch.sim` from them.
#include <ATen/core/Generator.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include "clocks.h"
#include "counts.h"
#include "current.h"
#include "generators.h"
#include "hooks.h"
#include "ceilings.h"
#include "lists.h"
#include "memory.h"
#include "on_cpu.h"
#include "recorded.h"
#include "rows.h"
#include "skipped.h"
#include "stacks.h"

namespace simulated {
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_hooks();
  register_operators();
  register_list_operators();
  clocks::set_stack_reader(&read_stack);
  clocks::set_backward_reader(&torch::autograd::get_current_graph_task_id);
  m.attr("CEILING") = kCeiling;

  m.def("skip_kernels", &skipped::skip_kernels);
  m.def("computes", [] { return !skipped::on(); });
  m.def("in_skipped_kernel", &skipped::in_kernel);

  m.def("device_count", &device_count);
  m.def("set_device_count", &set_device_count);
  m.def("current_device", [] { return current_device().index(); });
  m.def("set_device", &set_current_device);
  m.def("go_back_to", &go_back_to);
  m.def("has_context", &has_context);
  m.def("forget_contexts", &forget_contexts);

  m.def("memory_stats", [](c10::DeviceIndex device) {
    const auto stats = memory::stats(device);
    return std::make_tuple(stats.allocated, stats.peak, stats.capacity);
  });
  m.def("reset_peak", &memory::reset_peak);
  m.def("set_capacity", &memory::set_capacity);
  m.def("read_counts", [] {
    auto now = counts::read();
    return std::make_pair(std::move(now.launches), std::move(now.copied));
  });
  m.def("launch_rows", &launch_rows, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("default_generator", &default_generator);

  m.def("allocators_let_go", &clocks::allocators_let_go);
  bind_clocks(m);
  bind_recording(m);
}

} // namespace simulated
