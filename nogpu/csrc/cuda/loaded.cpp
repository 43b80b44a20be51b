#include "loaded.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <memory>
#include <unordered_set>

#include "keys.h"
#include "register.h"

namespace simulated {

Operators operators_now() {
  return {c10::Dispatcher::singleton().getAllOpNamesForDispatchKey(kKey)};
}

// An operator without a way to be computed on the CPU stays as it is: it may be made of other operators, and if it
// launches kernels, the runtime refuses them. torchvision's nms waits for its values on a GPU. No schema says so, so the
// clocks do not know of such waits.
void compute_those_since(const Operators& before) {
  const auto now = operators_now();
  if (now.names.size() == before.names.size()) {
    return;
  }
  static std::vector<std::unique_ptr<torch::Library>> libraries;
  const Quietly quietly;
  const std::unordered_set<c10::OperatorName> known(before.names.begin(), before.names.end());
  for (const auto& name : now.names) {
    const auto op = *c10::Dispatcher::singleton().findOp(name);
    const auto space = name.getNamespace();
    if (known.count(name) || !space || !op.hasSchema() || !op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      continue;
    }
    libraries.push_back(
        std::make_unique<torch::Library>(torch::Library::IMPL, std::string(*space), kKey, __FILE__, __LINE__));
    libraries.back()->impl(full_name(name).c_str(), on_cpu(op));
  }
}

} // namespace simulated
