// Watches what operators of the CPU read and write of pinned memory, which a stream may still be using.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace simulated {

// From now on every operator is looked at. Slows operators of the CPU down.
void watch_host();

// Keeps a message about the host that no call can raise, if there is none yet.
void keep_host_problem(std::string problem);

// The first message since the last call, or nothing. An operator of the CPU cannot be made to raise, so whoever checks
// the clocks next does.
std::string take_host_problem();

// Python is about to read the elements of a tensor without an operator. Throws c10::Error if a stream may still write
// them.
void host_reads(const at::Tensor& tensor, const std::string& op);

} // namespace simulated
