// The driver: devices, contexts, and how programs find its functions. The files driver_*.cpp have the rest.
//
// A context is the primary one of a device: the stand-in has no others.
#include <dlfcn.h>

#include <cstring>

#include "capturing.h"
#include "properties.h"
#include "state.h"

namespace standin {

// What this library exports is what there is: optional functions of the driver have to be absent, not failing.
void* driver_function(const std::string& name) {
  static void* const own = [] {
    Dl_info place;
    dladdr(reinterpret_cast<void*>(&cuInit), &place);
    return dlopen(place.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  if (own == nullptr || name.compare(0, 2, "cu") != 0 || name.compare(0, 4, "cuda") == 0) {
    return nullptr;
  }
  for (const auto* version : {"_v4", "_v3", "_v2", ""}) {
    if (auto* function = dlsym(own, (name + version).c_str())) {
      return function;
    }
  }
  return nullptr;
}

namespace {

cudaError_t copy_text(const std::string& from, char* to, int bytes) {
  if (bytes <= static_cast<int>(from.size())) {
    return cudaErrorInvalidValue;
  }
  std::memcpy(to, from.c_str(), from.size() + 1);
  return cudaSuccess;
}

CUcontext context_of(int device) {
  return device < 0 ? nullptr : reinterpret_cast<CUcontext>(&device_at(device));
}

Device& device_of(CUcontext context) {
  for (int i = 0; i < device_count(); ++i) {
    if (context_of(i) == context) {
      return device_at(i);
    }
  }
  throw Refused{cudaErrorDeviceUninitialized};
}

int current_context() {
  const auto& thread = this_thread();
  return thread.bound ? thread.device : -1;
}

void bind(int device) {
  auto& thread = this_thread();
  thread.bound = device >= 0;
  thread.device = device >= 0 ? device : thread.device;
}

Device& bound_device() {
  if (current_context() < 0) {
    throw Refused{cudaErrorDeviceUninitialized};
  }
  return device_at(current_context());
}

} // namespace
} // namespace standin

using namespace standin;

CUresult cuInit(unsigned flags) {
  return driver_entry(__func__, [&] {
    return flags != 0 ? cudaErrorInvalidValue : device_count() == 0 ? cudaErrorNoDevice : cudaSuccess;
  });
}

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  return driver_entry(__func__, [&] {
    *count = device_count();
    return cudaSuccess;
  });
}

CUresult cuDeviceGet(CUdevice* device, int index) {
  return driver_entry(__func__, [&] {
    *device = device_at(index).index;
    return cudaSuccess;
  });
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  return driver_entry(__func__, [&] {
    device_at(device);
    if (bytes < 1) {
      return cudaErrorInvalidValue;
    }
    std::strncpy(name, machine().name.c_str(), static_cast<size_t>(bytes));
    name[bytes - 1] = 0;
    return cudaSuccess;
  });
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return driver_entry(__func__, [&] {
    std::memcpy(uuid, uuid_of(device_at(device).physical).data(), sizeof *uuid);
    return cudaSuccess;
  });
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  return driver_entry(__func__, [&] {
    *bytes = capacity_of(device_at(device).index);
    return cudaSuccess;
  });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return driver_entry(__func__, [&] {
    return attribute_of(device_at(device).physical, attribute, value) ? cudaSuccess : cudaErrorInvalidValue;
  });
}

CUresult cuDeviceGetPCIBusId(char* text, int bytes, CUdevice device) {
  return driver_entry(__func__, [&] { return copy_text(pci_bus_id(device_at(device).physical), text, bytes); });
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return driver_entry(__func__, [&] { return can_be_peers(device_at(device), device_at(peer), can); });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return driver_entry(__func__, [&] {
    make_context(device_at(device));
    *context = context_of(device);
    return cudaSuccess;
  });
}

// The runtime holds the contexts, so they stay.
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return driver_entry(__func__, [&] {
    return device_at(device).context ? cudaSuccess : cudaErrorDeviceUninitialized;
  });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return driver_entry(__func__, [&] {
    const auto& known = device_at(device);
    *flags = known.flags;
    *active = known.context;
    return cudaSuccess;
  });
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags) {
  return driver_entry(__func__, [&] {
    device_at(device).flags = flags;
    return cudaSuccess;
  });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  return driver_entry(__func__, [&] {
    *context = context_of(current_context());
    return cudaSuccess;
  });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return driver_entry(__func__, [&] {
    bind(context == nullptr ? -1 : device_of(context).index);
    return cudaSuccess;
  });
}

CUresult cuCtxPushCurrent(CUcontext context) {
  return driver_entry(__func__, [&] {
    const auto device = device_of(context).index;
    this_thread().contexts.push_back(current_context());
    bind(device);
    return cudaSuccess;
  });
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  return driver_entry(__func__, [&] {
    auto& below = this_thread().contexts;
    const auto popped = bound_device().index;
    bind(below.empty() ? -1 : below.back());
    if (!below.empty()) {
      below.pop_back();
    }
    if (context != nullptr) {
      *context = context_of(popped);
    }
    return cudaSuccess;
  });
}

CUresult cuCtxGetDevice(CUdevice* device) {
  return driver_entry(__func__, [&] {
    *device = bound_device().index;
    return cudaSuccess;
  });
}

CUresult cuCtxGetFlags(unsigned* flags) {
  return driver_entry(__func__, [&] {
    *flags = bound_device().flags;
    return cudaSuccess;
  });
}

CUresult cuCtxGetApiVersion(CUcontext context, unsigned* version) {
  return driver_entry(__func__, [&] {
    if (context != nullptr) {
      device_of(context);
    }
    *version = 3020;
    return cudaSuccess;
  });
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return driver_entry(__func__, [&] {
    bound_device();
    if (least != nullptr) {
      *least = kLeastPriority;
    }
    if (greatest != nullptr) {
      *greatest = kGreatestPriority;
    }
    return cudaSuccess;
  });
}

CUresult cuCtxSynchronize() {
  return driver_entry(__func__, [&] {
    const auto device = bound_device().index;
    refuse_while_capturing(device);
    wait_for_device(device, "cuCtxSynchronize");
    return cudaSuccess;
  });
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  return driver_entry(__func__, [&] {
    auto& device = bound_device();
    return enable_peer(device, device_of(peer), flags);
  });
}

CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  return driver_entry(__func__, [&] {
    *function = driver_function(name);
    if (found != nullptr) {
      *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
  });
}

// Without a function there is an error only if the caller does not ask how it went.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  return entry(__func__, [&] {
    *function = driver_function(name);
    if (found != nullptr) {
      *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    }
    return *function || found ? cudaSuccess : cudaErrorSymbolNotFound;
  });
}
