// Counts the calls of this library in the runtime's counts.
#pragma once

namespace standin {
// Of the runtime, if it has it.
__attribute__((weak, visibility("default"))) void count_call(const char* function);
} // namespace standin

namespace nccl {

inline void count(const char* function) {
  if (standin::count_call != nullptr) {
    standin::count_call(function);
  }
}

} // namespace nccl
