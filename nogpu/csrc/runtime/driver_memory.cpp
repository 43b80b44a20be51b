// The driver's functions of memory, copies and fills.
#include <cstring>

#include "state.h"

using namespace standin;

namespace {

char* at(CUdeviceptr address) {
  return reinterpret_cast<char*>(address);
}

Rows rows(CUdeviceptr address) {
  return {at(address), 0};
}

Rows rows(const void* address) {
  return {const_cast<char*>(static_cast<const char*>(address)), 0};
}

cudaError_t fill_values(const char* call, CUdeviceptr to, uint32_t value, size_t value_bytes, size_t count,
                        CUstream stream) {
  return to % value_bytes != 0
      ? cudaErrorInvalidValue
      : fill(call, rows(to), {count * value_bytes}, value, value_bytes, stream_of(stream));
}

size_t size_of(CUpointer_attribute attribute) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: return sizeof(bool);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return sizeof(int);
    default: return sizeof(void*);
  }
}

// What the stand-in does not know of a pointer is refused, not guessed.
cudaError_t pointer_attribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  const auto* allocation = allocation_of(at(address));
  if (allocation == nullptr) {
    return cudaErrorInvalidValue;
  }
  const bool host = allocation->device < 0;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return cudaSuccess;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<void**>(value) = &device_at(allocation->owner);
      return cudaSuccess;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = allocation->owner;
      return cudaSuccess;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(value) = address;
      return cudaSuccess;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *static_cast<void**>(value) = host ? at(address) : nullptr;
      return host ? cudaSuccess : cudaErrorInvalidValue;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<void**>(value) = allocation->begin;
      return cudaSuccess;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<size_t*>(value) = allocation->bytes;
      return cudaSuccess;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *static_cast<bool*>(value) = false;
      return cudaSuccess;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      *static_cast<bool*>(value) = true;
      return cudaSuccess;
    default: return cudaErrorNotSupported;
  }
}

} // namespace

CUresult cuMemGetInfo(size_t* free, size_t* total) {
  return in_context(__func__, [&] {
    memory_info(free, total);
    return cudaSuccess;
  });
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  return in_context(__func__, [&] {
    return bytes == 0 ? cudaErrorInvalidValue : allocate(reinterpret_cast<void**>(address), bytes);
  });
}

CUresult cuMemFree(CUdeviceptr address) {
  return in_context(__func__, [&] { return release(at(address), "cuMemFree"); });
}

CUresult cuMemAllocHost(void** address, size_t bytes) {
  return in_context(__func__, [&] { return allocate_host(address, bytes, 0); });
}

CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  return in_context(__func__, [&] { return allocate_host(address, bytes, flags); });
}

CUresult cuMemFreeHost(void* address) {
  return in_context(__func__, [&] { return release_host(address, "cuMemFreeHost"); });
}

CUresult cuMemHostRegister(void* address, size_t bytes, unsigned flags) {
  return in_context(__func__, [&] { return register_host(address, bytes, flags); });
}

CUresult cuMemHostUnregister(void* address) {
  return in_context(__func__, [&] { return unregister_host(address); });
}

CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* bytes, CUdeviceptr address) {
  return driver_entry(__func__, [&] {
    const auto* allocation = allocation_of(at(address));
    if (allocation == nullptr || allocation->device < 0) {
      return cudaErrorSymbolNotFound; // CUDA_ERROR_NOT_FOUND
    }
    if (begin != nullptr) {
      *begin = reinterpret_cast<CUdeviceptr>(allocation->begin);
    }
    if (bytes != nullptr) {
      *bytes = allocation->bytes;
    }
    return cudaSuccess;
  });
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  return driver_entry(__func__, [&] { return pointer_attribute(value, attribute, address); });
}

// Of an unknown pointer all attributes are zero.
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values, CUdeviceptr address) {
  return driver_entry(__func__, [&] {
    for (unsigned i = 0; i < count; ++i) {
      const auto error = pointer_attribute(values[i], attributes[i], address);
      if (error == cudaErrorNotSupported) {
        return error;
      }
      if (error != cudaSuccess) {
        std::memset(values[i], 0, size_of(attributes[i]));
      }
    }
    return cudaSuccess;
  });
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return in_context(__func__, [&] {
    return copy("cuMemcpy", rows(to), rows(from), {bytes}, cudaMemcpyDefault, stream_of(nullptr), true);
  });
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return in_context(__func__, [&] {
    return copy("cuMemcpyAsync", rows(to), rows(from), {bytes}, cudaMemcpyDefault, stream_of(stream), false);
  });
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return in_context(__func__, [&] {
    return copy("cuMemcpyHtoD", rows(to), rows(from), {bytes}, cudaMemcpyHostToDevice, stream_of(nullptr), true);
  });
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return in_context(__func__, [&] {
    return copy("cuMemcpyHtoDAsync", rows(to), rows(from), {bytes}, cudaMemcpyHostToDevice, stream_of(stream), false);
  });
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return in_context(__func__, [&] {
    return copy("cuMemcpyDtoH", rows(to), rows(from), {bytes}, cudaMemcpyDeviceToHost, stream_of(nullptr), true);
  });
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return in_context(__func__, [&] {
    return copy("cuMemcpyDtoHAsync", rows(to), rows(from), {bytes}, cudaMemcpyDeviceToHost, stream_of(stream), false);
  });
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return in_context(__func__, [&] {
    return copy("cuMemcpyDtoD", rows(to), rows(from), {bytes}, cudaMemcpyDeviceToDevice, stream_of(nullptr), true);
  });
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return in_context(__func__, [&] {
    return copy("cuMemcpyDtoDAsync", rows(to), rows(from), {bytes}, cudaMemcpyDeviceToDevice, stream_of(stream), false);
  });
}

CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
  return in_context(__func__, [&] { return fill_values("cuMemsetD8", to, value, 1, count, nullptr); });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return in_context(__func__, [&] { return fill_values("cuMemsetD8Async", to, value, 1, count, stream); });
}

CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  return in_context(__func__, [&] { return fill_values("cuMemsetD16Async", to, value, 2, count, stream); });
}

CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t count) {
  return in_context(__func__, [&] { return fill_values("cuMemsetD32", to, value, 4, count, nullptr); });
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  return in_context(__func__, [&] { return fill_values("cuMemsetD32Async", to, value, 4, count, stream); });
}
