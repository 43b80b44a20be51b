// The Python bindings. extension.py holds the module.
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include "clocks.h"
#include "counts.h"
#include "host.h"
#include "operators.h"
#include "recorded.h"
#include "returned.h"
#include "stacks.h"
#include "watch.h"

namespace simulated {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register", [] {
    clocks::set_stack_reader(&read_stack);
    clocks::set_backward_reader(&torch::autograd::get_current_graph_task_id);
    watch_runtime();
    register_operators();
  });
  m.def("watch_allocator", &watch_allocator);
  m.def("watch_host", &watch_host);
  m.def("take_host_problem", &take_host_problem);
  m.def("answer_queries_late", &answer_queries_late);
  m.def("read_counts", [] {
    auto now = counts::read();
    return std::make_pair(std::move(now.launches), std::move(now.copied));
  });
  m.def("counts", [] {
    const auto now = standin::counts();
    return std::make_tuple(now.calls, now.kernels, now.contexts, now.host_waits);
  });
  m.def("forget_counts", &standin::forget_counts);
  bind_clocks(m);
  bind_recording(m);
}

} // namespace simulated
