// The Python bindings. extension.py holds the module.
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include "allocators.h"
#include "clocks.h"
#include "counts.h"
#include "host.h"
#include "loaded.h"
#include "operators.h"
#include "recorded.h"
#include "skipped.h"
#include "stacks.h"
#include "waits.h"
#include "watch.h"

namespace simulated {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register", [] {
    clocks::set_stack_reader(&read_stack);
    clocks::set_backward_reader(&torch::autograd::get_current_graph_task_id);
    watch_runtime();
    register_operators();
  });
  pybind11::class_<Operators>(m, "Operators");
  m.def("operators_now", &operators_now);
  m.def("compute_those_since", &compute_those_since);
  m.def("watch_allocators", &allocators::watch);
  m.def("watch_host", &watch_host);
  m.def("take_host_problem", &take_host_problem);
  m.def("take_untold", &standin::take_untold);
  m.def("host_reads", &host_reads);
  m.def("answer_queries_late", &answer_queries_late);
  m.def("set_skipping", &standin::set_skipping);
  m.def("describe_kernels", [](const std::optional<std::vector<std::tuple<uintptr_t, size_t, bool>>>& accesses) {
    static thread_local std::vector<standin::Part> parts;
    standin::describe_kernels(nullptr);
    parts.clear();
    if (accesses) {
      for (const auto& [address, bytes, writes] : *accesses) {
        parts.push_back(standin::part_of(reinterpret_cast<void*>(address), bytes, writes, "what a program described"));
      }
      standin::describe_kernels(&parts);
    }
  });
  m.def("in_skipped_kernel", &skipped::in_kernel);
  m.def("read_counts", [] {
    auto now = counts::read();
    return std::make_pair(std::move(now.launches), std::move(now.copied));
  });
  m.def("launches_in_graphs", &launches_in_graphs);
  m.def("pass_over", &waits::pass_over);
  m.def("keep_lines", &waits::keep_lines);
  m.def("lines_kept", &waits::size);
  m.def("read_lines", [](size_t from) {
    std::vector<std::tuple<std::string, std::string, int, std::string>> result;
    for (auto& wait : waits::read(from)) {
      result.emplace_back(wait.call, wait.file, wait.line, wait.function);
    }
    return result;
  });
  bind_clocks(m);
  bind_recording(m);
}

} // namespace simulated
