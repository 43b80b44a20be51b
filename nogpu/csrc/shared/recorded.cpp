#include "recorded.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include "clocks.h"

namespace py = pybind11;
namespace simulated {
namespace {

py::list pairs(const Entry::Marks& marks) {
  py::list result;
  for (const auto& [number, mark] : marks) {
    result.append(py::make_tuple(number, mark));
  }
  return result;
}

py::tuple shapes(const Work& work) {
  py::list result;
  for (auto size = work.shapes.begin(); size != work.shapes.end();) {
    py::tuple shape(static_cast<size_t>(*size++));
    for (size_t i = 0; i < shape.size(); ++i) {
      shape[i] = *size++;
    }
    result.append(std::move(shape));
  }
  return py::tuple(result);
}

py::object copy(const Work& work) {
  if (!work.copy) {
    return py::none();
  }
  return py::make_tuple(static_cast<int>(work.copy->source), static_cast<int>(work.copy->target));
}

py::list peers(const Work& work) {
  py::list result;
  for (const auto& [ends, bytes] : work.peers) {
    result.append(py::make_tuple(static_cast<int>(ends.source), static_cast<int>(ends.target), bytes));
  }
  return result;
}

// The arguments and results that the formula for the FLOPs takes, or None.
py::object call(const Work& work) {
  if (!work.has_formula || !keeps_arguments_of(work.op)) {
    return py::none();
  }
  py::list positional, results;
  py::dict keywords;
  for (const auto& value : work.positional) {
    positional.append(torch::jit::toPyObject(value));
  }
  for (const auto& [name, value] : work.keywords) {
    keywords[py::str(name)] = torch::jit::toPyObject(value);
  }
  for (const auto& value : work.results) {
    results.append(torch::jit::toPyObject(value));
  }
  return py::make_tuple(positional, keywords, results);
}

py::dict described(const Entry& entry) {
  using namespace py::literals;
  return py::dict(
      "stream"_a = entry.stream, "tick"_a = entry.tick, "thread"_a = entry.thread, "in_backward"_a = entry.in_backward,
      "is_done"_a = entry.is_done, "joins"_a = entry.joins, "waits"_a = pairs(entry.waits),
      "host_waits"_a = pairs(entry.host_waits), "issued_after"_a = pairs(entry.issued_after),
      "host_seconds"_a = entry.host_seconds, "graph"_a = entry.graph, "stack"_a = entry.stack, "op"_a = entry.work.op,
      "bytes_read"_a = entry.work.bytes_read, "bytes_written"_a = entry.work.bytes_written,
      "dtype"_a = entry.work.dtype, "shapes"_a = shapes(entry.work), "copy"_a = copy(entry.work),
      "peers"_a = peers(entry.work), "call"_a = call(entry.work));
}

// Returns the first entry and removes it, or None, so that entries are not in memory twice.
py::object take(Recorded& recorded) {
  if (recorded.entries.empty()) {
    return py::none();
  }
  auto result = described(recorded.entries.front());
  recorded.entries.pop_front();
  return result;
}

// The device and the id of each stream.
py::list streams(const Recorded& recorded) {
  py::list result;
  for (const auto& stream : recorded.streams) {
    result.append(py::make_tuple(static_cast<int>(stream.device_index()), stream.id()));
  }
  return result;
}

} // namespace

void bind_recording(py::module_& m) {
  m.def("keep_arguments_of", &keep_arguments_of);
  m.def("start_recording", &clocks::start_recording);
  m.def("stop_recording", &clocks::stop_recording);
  py::class_<Recorded>(m, "Recorded")
      .def_readonly("is_full", &Recorded::is_full)
      .def_property_readonly("streams", &streams)
      .def("take", &take);
}

} // namespace simulated
