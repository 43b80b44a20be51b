// Devices: which one is current, what they say of themselves, and their primary contexts, which are made only where
// CUDA makes them.
#include <cstdio>
#include <cstring>

#include "capturing.h"
#include "properties.h"

namespace standin {

int device_count() {
  return static_cast<int>(devices().size());
}

Device& device_at(int index) {
  if (index < 0 || index >= device_count()) {
    throw Refused{device_count() == 0 ? cudaErrorNoDevice : cudaErrorInvalidDevice};
  }
  return *devices()[static_cast<size_t>(index)];
}

void make_context(Device& device) {
  device.context.store(true, std::memory_order_relaxed);
}

Device& context_here() {
  auto& thread = this_thread();
  auto& device = device_at(thread.device);
  if (!thread.bound) {
    thread.bound = true;
    make_context(device);
  }
  return device;
}

void set_current(int index) {
  auto& device = device_at(index);
  make_context(device);
  auto& thread = this_thread();
  thread.device = index;
  thread.bound = true;
}

} // namespace standin

using namespace standin;

cudaError_t cudaGetDeviceCount(int* count) {
  return entry(__func__, [&] {
    *count = device_count();
    return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return entry(__func__, [&] {
    device_at(0); // if there are any
    *device = this_thread().device;
    return cudaSuccess;
  });
}

// Since CUDA 12 it makes the primary context.
cudaError_t cudaSetDevice(int device) {
  return entry(__func__, [&] {
    set_current(device);
    return cudaSuccess;
  });
}

cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  return entry(__func__, [&] {
    make_context(device_at(device));
    return cudaSuccess;
  });
}

cudaError_t cudaSetDeviceFlags(unsigned flags) {
  return entry(__func__, [&] {
    device_at(this_thread().device).flags = flags & cudaDeviceMask;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  return entry(__func__, [&] {
    *flags = device_at(this_thread().device).flags;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return entry(__func__, [&] {
    const auto& known = device_at(device);
    std::memset(properties, 0, sizeof *properties);
    std::snprintf(properties->name, sizeof properties->name, "%s", machine().name.c_str());
    std::memcpy(&properties->uuid, uuid_of(known.physical).data(), 16);
    properties->totalGlobalMem = capacity_of(device);
    fill_properties(*properties, known.physical);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return entry(__func__, [&] {
    return attribute_of(device_at(device).physical, attribute, value) ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  return entry(__func__, [&] {
    const auto id = pci_bus_id(device_at(device).physical);
    if (bytes <= static_cast<int>(id.size())) {
      return cudaErrorInvalidValue;
    }
    std::memcpy(text, id.c_str(), id.size() + 1);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* text) {
  return entry(__func__, [&] {
    for (int i = 0; i < device_count(); ++i) {
      if (pci_bus_id(device_at(i).physical) == text) {
        *device = i;
        return cudaSuccess;
      }
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return entry(__func__, [&] {
    context_here();
    if (least != nullptr) {
      *least = kLeastPriority;
    }
    if (greatest != nullptr) {
      *greatest = kGreatestPriority;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit limit) {
  return entry(__func__, [&] {
    context_here();
    switch (limit) {
      case cudaLimitStackSize: *value = 1024; return cudaSuccess;
      case cudaLimitPrintfFifoSize: *value = 1 << 20; return cudaSuccess;
      case cudaLimitMallocHeapSize: *value = 8 << 20; return cudaSuccess;
      default: return cudaErrorUnsupportedLimit;
    }
  });
}

cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) {
  return entry(__func__, [&] {
    context_here(); // kernels of the stand-in have no limits
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return entry(__func__, [&] {
    const auto device = context_here().index;
    refuse_while_capturing(device);
    wait_for_device(device, "cudaDeviceSynchronize");
    return cudaSuccess;
  });
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() {
  return entry(__func__, [] { return cudaSuccess; });
}

cudaError_t cudaProfilerStop() {
  return entry(__func__, [] { return cudaSuccess; });
}
