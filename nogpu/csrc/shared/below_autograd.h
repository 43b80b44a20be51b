// Switches autograd and autocast off below an operator of a device. Both have run before it is called.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace simulated {

struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

} // namespace simulated
