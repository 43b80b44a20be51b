// What both extensions bind for Python: the clocks, and the stack of Python for their messages.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace simulated {

// The calling thread's stack, or nothing where no Python runs.
std::string read_stack();

void bind_clocks(pybind11::module_& m);

} // namespace simulated
