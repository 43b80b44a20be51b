// Registers operators of torch's CUDA build that are computed by kernels of the CPU, on the same memory.
#pragma once

namespace simulated {

void register_operators();

} // namespace simulated
