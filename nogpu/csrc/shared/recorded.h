// What was recorded, for Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace simulated {

// Adds `start_recording`, `stop_recording` and `keep_arguments_of` to the module. timeline/recording.py calls them.
void bind_recording(pybind11::module_& m);

} // namespace simulated
