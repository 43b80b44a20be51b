// The functions of CUDA's runtime that allocate, free and ask whose an address is. memory.cpp does it.
#include <cstring>

#include "capturing.h"

using namespace standin;

cudaError_t cudaMalloc(void** address, size_t bytes) {
  return entry(__func__, [&] {
    refuse_while_capturing();
    return allocate(address, bytes);
  });
}

cudaError_t cudaFree(void* address) {
  return entry(__func__, [&] {
    refuse_while_capturing();
    return release(address, "cudaFree");
  });
}

cudaError_t cudaMallocPitch(void** address, size_t* pitch, size_t width, size_t height) {
  return entry(__func__, [&] {
    *pitch = (width + 511) / 512 * 512;
    return allocate(address, *pitch * height);
  });
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return entry(__func__, [&] {
    memory_info(free, total);
    return cudaSuccess;
  });
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned flags) {
  return entry(__func__, [&] {
    refuse_while_capturing();
    return allocate_host(address, bytes, flags);
  });
}

cudaError_t cudaMallocHost(void** address, size_t bytes) {
  return entry(__func__, [&] {
    refuse_while_capturing();
    return allocate_host(address, bytes, cudaHostAllocDefault);
  });
}

cudaError_t cudaFreeHost(void* address) {
  return entry(__func__, [&] {
    refuse_while_capturing();
    return release_host(address, "cudaFreeHost");
  });
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned flags) {
  return entry(__func__, [&] { return register_host(address, bytes, flags); });
}

cudaError_t cudaHostUnregister(void* address) {
  return entry(__func__, [&] { return unregister_host(address); });
}

cudaError_t cudaHostGetDevicePointer(void** pointer, void* address, unsigned) {
  return entry(__func__, [&] {
    const auto* allocation = allocation_of(address);
    *pointer = allocation != nullptr && allocation->device < 0 ? address : nullptr;
    return *pointer ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaHostGetFlags(unsigned* flags, void* address) {
  return entry(__func__, [&] {
    const auto* allocation = allocation_of(address);
    if (allocation == nullptr || allocation->kind != Allocation::Kind::kPinned) {
      return cudaErrorInvalidValue;
    }
    *flags = allocation->flags | cudaHostAllocMapped;
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  return entry(__func__, [&] {
    context_here();
    std::memset(attributes, 0, sizeof *attributes);
    const auto* allocation = allocation_of(address);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    auto* pointer = const_cast<void*>(address);
    if (allocation == nullptr) {
      attributes->hostPointer = pointer;
      return cudaSuccess;
    }
    attributes->device = allocation->owner;
    attributes->devicePointer = pointer;
    attributes->type = allocation->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->hostPointer = allocation->device < 0 ? pointer : nullptr;
    return cudaSuccess;
  });
}
