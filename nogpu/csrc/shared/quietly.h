// Keeps torch's warnings away from the caller.
#pragma once

#include <c10/util/Exception.h>

namespace simulated {

// While this exists, torch does not warn in this thread: of kernels that are replaced, or of what a meta kernel has said.
class Quietly {
 public:
  Quietly() : guard_(&silence_) {}

 private:
  struct Silence final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Silence silence_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

} // namespace simulated
