// Memory pools, which the devices say they do not have (cudaDevAttrMemoryPoolsSupported), and memory of other
// processes: not supported, in CUDA's words.
#include "state.h"

using namespace standin;

#define NOT_SUPPORTED(function, ...)                                \
  cudaError_t function(__VA_ARGS__) {                               \
    return entry(__func__, [] { return cudaErrorNotSupported; });   \
  }

NOT_SUPPORTED(cudaMallocAsync, void**, size_t, cudaStream_t)
NOT_SUPPORTED(cudaMallocFromPoolAsync, void**, size_t, cudaMemPool_t, cudaStream_t)
NOT_SUPPORTED(cudaFreeAsync, void*, cudaStream_t)
NOT_SUPPORTED(cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
NOT_SUPPORTED(cudaDeviceGetMemPool, cudaMemPool_t*, int)
NOT_SUPPORTED(cudaDeviceSetMemPool, int, cudaMemPool_t)
NOT_SUPPORTED(cudaMemPoolCreate, cudaMemPool_t*, const cudaMemPoolProps*)
NOT_SUPPORTED(cudaMemPoolDestroy, cudaMemPool_t)
NOT_SUPPORTED(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOT_SUPPORTED(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOT_SUPPORTED(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
NOT_SUPPORTED(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
NOT_SUPPORTED(cudaMallocManaged, void**, size_t, unsigned)
NOT_SUPPORTED(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
NOT_SUPPORTED(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
NOT_SUPPORTED(cudaIpcCloseMemHandle, void*)
NOT_SUPPORTED(cudaIpcGetEventHandle, cudaIpcEventHandle_t*, cudaEvent_t)
NOT_SUPPORTED(cudaIpcOpenEventHandle, cudaEvent_t*, cudaIpcEventHandle_t)

// Graphs have no memory of their own where no graph is captured.
cudaError_t cudaDeviceGetGraphMemAttribute(int device, cudaGraphMemAttributeType, void* value) {
  return entry(__func__, [&] {
    device_at(device);
    *static_cast<uint64_t*>(value) = 0;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSetGraphMemAttribute(int device, cudaGraphMemAttributeType, void*) {
  return entry(__func__, [&] {
    device_at(device);
    return cudaSuccess;
  });
}
