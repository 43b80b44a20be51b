// Watches what operators of the CPU read and write of pinned memory, which a stream may still be using.
#pragma once

#include <string>

namespace simulated {

// From now on every operator is looked at. Slows operators of the CPU down.
void watch_host();

// The first message since the last call, or nothing. An operator of the CPU cannot be made to raise, so whoever checks
// the clocks next does.
std::string take_host_problem();

} // namespace simulated
