// Which devices the files of this folder are compiled for: torch's name of them, its keys for their tensors, and words
// for messages.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>

namespace simulated {

#ifdef NOGPU_CUDA
constexpr auto kDevice = c10::kCUDA;
constexpr const char* kOneDevice = "a CUDA device";
constexpr const char* kWithStacks = "nogpu.cuda.clocks(stacks=True)";
constexpr auto kKey = c10::DispatchKey::CUDA;
constexpr auto kAutogradKey = c10::DispatchKey::AutogradCUDA;
constexpr auto kSparseKey = c10::DispatchKey::SparseCUDA;
constexpr auto kSparseCsrKey = c10::DispatchKey::SparseCsrCUDA;
constexpr auto kNestedKey = c10::DispatchKey::NestedTensorCUDA;
constexpr auto kQuantizedKey = c10::DispatchKey::QuantizedCUDA;
#else
constexpr auto kDevice = c10::kPrivateUse1;
constexpr const char* kOneDevice = "a simulated device";
constexpr const char* kWithStacks = "torch.sim.clocks(stacks=True)";
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
constexpr auto kAutogradKey = c10::DispatchKey::AutogradPrivateUse1;
constexpr auto kSparseKey = c10::DispatchKey::SparsePrivateUse1;
constexpr auto kSparseCsrKey = c10::DispatchKey::SparseCsrPrivateUse1;
constexpr auto kNestedKey = c10::DispatchKey::NestedTensorPrivateUse1;
constexpr auto kQuantizedKey = c10::DispatchKey::QuantizedPrivateUse1;
#endif

} // namespace simulated
