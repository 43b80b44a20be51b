#include "properties.h"

#include <climits>
#include <cstdio>

namespace standin {

namespace {

constexpr int kThreads = 1024;
constexpr int kRegisters = 65536;
constexpr int kShared = 48 << 10;
constexpr int kSharedOfProcessor = 164 << 10;
constexpr int kSharedOptin = 163 << 10;
constexpr int kL2 = 40 << 20;

int pci_bus(int physical) {
  return physical + 1;
}

} // namespace

std::string pci_bus_id(int physical) {
  char text[16];
  std::snprintf(text, sizeof text, "0000:%02X:00.0", static_cast<unsigned char>(pci_bus(physical)));
  return text;
}

void fill_properties(cudaDeviceProp& properties, int physical) {
  properties.major = machine().major;
  properties.minor = machine().minor;
  properties.multiProcessorCount = machine().processors;
  properties.ECCEnabled = machine().ecc;
  properties.sharedMemPerBlock = kShared;
  properties.sharedMemPerBlockOptin = kSharedOptin;
  properties.sharedMemPerMultiprocessor = kSharedOfProcessor;
  properties.reservedSharedMemPerBlock = 1 << 10;
  properties.regsPerBlock = properties.regsPerMultiprocessor = kRegisters;
  properties.warpSize = 32;
  properties.memPitch = INT_MAX;
  properties.maxThreadsPerBlock = properties.maxThreadsDim[0] = properties.maxThreadsDim[1] = kThreads;
  properties.maxThreadsDim[2] = 64;
  properties.maxGridSize[0] = INT_MAX;
  properties.maxGridSize[1] = properties.maxGridSize[2] = 65535;
  properties.totalConstMem = 64 << 10;
  properties.textureAlignment = 512;
  properties.texturePitchAlignment = 32;
  properties.surfaceAlignment = 512;
  properties.canMapHostMemory = 1;
  properties.concurrentKernels = 1;
  properties.pciBusID = pci_bus(physical);
  properties.asyncEngineCount = 3;
  properties.unifiedAddressing = 1;
  properties.memoryBusWidth = 5120;
  properties.l2CacheSize = kL2;
  properties.maxThreadsPerMultiProcessor = 2048;
  properties.maxBlocksPerMultiProcessor = 32;
  properties.streamPrioritiesSupported = 1;
  properties.globalL1CacheSupported = properties.localL1CacheSupported = 1;
  properties.hostRegisterSupported = 1;
  properties.canUseHostPointerForRegisteredMem = 1;
}

bool attribute_of(int physical, int attribute, int* value) {
  if (attribute < 1 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) {
    return false;
  }
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = kThreads; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = INT_MAX; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = kShared; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kSharedOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = kSharedOfProcessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1 << 10; break;
    case cudaDevAttrTotalConstantMemory: *value = 64 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxPitch: *value = INT_MAX; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = kRegisters; break;
    case cudaDevAttrClockRate: *value = 1410000; break;
    case cudaDevAttrMemoryClockRate: *value = 1215000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrTextureAlignment:
    case cudaDevAttrSurfaceAlignment: *value = 512; break;
    case cudaDevAttrTexturePitchAlignment: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = machine().processors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = machine().major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = machine().minor; break;
    case cudaDevAttrEccEnabled: *value = machine().ecc; break;
    case cudaDevAttrPciBusId: *value = pci_bus(physical); break;
    case cudaDevAttrL2CacheSize: *value = kL2; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrAsyncEngineCount: *value = 3; break;
    case cudaDevAttrSingleToDoublePrecisionPerfRatio: *value = 2; break;
    case cudaDevAttrGpuOverlap:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrGlobalL1CacheSupported:
    case cudaDevAttrLocalL1CacheSupported:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrMemSyncDomainCount: *value = 1; break;
    case cudaDevAttrNumaId:
    case cudaDevAttrHostNumaId: *value = -1; break;
    default: *value = 0;
  }
  return true;
}

} // namespace standin
