#include "waits.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "process_state.h"

namespace py = pybind11;
namespace simulated::waits {
namespace {

struct State {
  std::mutex mutex;
  std::vector<std::string> folders;
  std::vector<Wait> kept;
  int keepers = 0;
};

std::atomic<bool> keeps{false};

std::vector<std::string> folders() {
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return s.folders;
}

// The innermost frame outside of the folders. The caller holds the interpreter lock.
void find_line(Wait& wait) {
  const auto passed = folders();
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* const of_python = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(of_python)));
    const auto file = code.attr("co_filename").cast<std::string>();
    const bool is_tool = std::any_of(passed.begin(), passed.end(),
                                     [&](const std::string& folder) { return file.rfind(folder, 0) == 0; });
    if (!is_tool) {
      wait.file = file;
      wait.line = PyFrame_GetLineNumber(of_python);
      wait.function = code.attr("co_name").cast<std::string>();
      return;
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(of_python)));
  }
}

} // namespace

void pass_over(std::vector<std::string> folders) {
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.folders = std::move(folders);
}

void keep_lines(bool on) {
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.keepers += on ? 1 : -1;
  keeps = s.keepers > 0;
  if (!keeps) {
    s.kept.clear();
  }
}

void noted(const char* call, bool may_ask) {
  if (!keeps) {
    return;
  }
  Wait wait{call, "", 0, ""};
  if (Py_IsInitialized() && (may_ask || PyGILState_Check())) {
    const py::gil_scoped_acquire gil;
    find_line(wait);
  }
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.keepers > 0) {
    s.kept.push_back(std::move(wait));
  }
}

size_t size() {
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return s.kept.size();
}

std::vector<Wait> read(size_t from) {
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return {s.kept.begin() + static_cast<ptrdiff_t>(std::min(from, s.kept.size())), s.kept.end()};
}

} // namespace simulated::waits
