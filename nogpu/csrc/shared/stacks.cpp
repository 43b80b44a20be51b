#include "stacks.h"

#include <vector>

#include "clocks.h"

namespace py = pybind11;
namespace simulated {

std::string read_stack() {
  if (!Py_IsInitialized()) {
    return "";
  }
  py::gil_scoped_acquire gil;
  if (!PyEval_GetFrame()) {
    return ""; // a thread of the autograd engine
  }
  const auto lines = py::module_::import("traceback").attr("format_stack")().cast<std::vector<std::string>>();
  std::string result;
  for (const auto& line : lines) {
    result += line;
  }
  return result;
}

void bind_clocks(py::module_& m) {
  py::class_<Knowledge, std::shared_ptr<Knowledge>>(m, "Knowledge");
  m.def("enable_clocks", &clocks::enable);
  m.def("keep_stacks", &clocks::keep_stacks);
  m.def("check", &clocks::check);
  m.def("knowledge", &clocks::knowledge);
  m.def("snapshot", &clocks::snapshot);
  m.def("learn", &clocks::learn);
  m.def("tell", &clocks::tell);
  m.def("enter_thread", &clocks::enter_thread);
}

} // namespace simulated
