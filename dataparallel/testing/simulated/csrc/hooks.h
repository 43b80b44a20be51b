// What torch asks of a backend beside its guards: whether it is there, its generators, its pinned memory.
#pragma once

namespace simulated {

void register_hooks();

} // namespace simulated
