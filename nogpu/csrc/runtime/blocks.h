// Runs the threads of a kernel on the host: block after block, and within a block each thread until it ends or waits
// for others. It runs what modules.cpp has loaded, and tells `Touched` of each access. It knows no streams and no
// clocks.
#pragma once

#include <string>

#include "../nvrtc/shim/module.h"
#include "touched.h"

namespace standin {

struct Shape {
  Triple grid, block;
  size_t shared_bytes; // dynamic shared memory
};

// Runs all threads. Kernels of a process run one at a time: the caller holds a lock. Returns why the kernel stopped in
// the middle, or an empty text. What it has written until then stays.
std::string run_blocks(const Module& module, const Entry& entry, void** arguments, const Shape& shape,
                       Touched& touched);

} // namespace standin
