// The driver's functions of modules and kernels: what CuPy and torch call with what NVRTC has compiled.
#include <cstring>
#include <fstream>
#include <sstream>

#include "modules.h"

namespace standin {
namespace {

constexpr unsigned kMostThreads = 1024;
constexpr size_t kMostShared = 227 << 10;

// The arguments of a launch as addresses of values. A caller may give them in one buffer, laid out as a structure.
class Arguments {
 public:
  Arguments(const Entry& entry, void** addresses, void** extra) : addresses_(addresses) {
    if (addresses != nullptr || entry.count == 0) return;
    char* buffer = nullptr;
    for (void** at = extra; at != nullptr && *at != CU_LAUNCH_PARAM_END; at += 2) {
      if (*at == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = static_cast<char*>(at[1]);
    }
    if (buffer == nullptr) throw Refused{cudaErrorInvalidValue};
    size_t offset = 0;
    for (size_t i = 0; i < entry.count; ++i) {
      const Parameter& parameter = entry.parameters[i];
      offset = (offset + parameter.alignment - 1) / parameter.alignment * parameter.alignment;
      own_.push_back(buffer + offset);
      offset += parameter.bytes;
    }
    addresses_ = own_.data();
  }
  void** get() { return addresses_; }

 private:
  void** addresses_;
  std::vector<void*> own_;
};

cudaError_t launch(CUfunction handle, const Shape& shape, CUstream stream_handle, void** addresses, void** extra) {
  LoadedFunction& function = function_of(handle);
  const auto& [grid, block, shared_bytes] = shape;
  const bool none = grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0;
  const bool too_many_blocks = grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535;
  const bool too_many_threads = block.x > kMostThreads || block.y > kMostThreads || block.z > 64 ||
                                block.x * block.y * block.z > kMostThreads;
  if (none || too_many_blocks || too_many_threads || shared_bytes > kMostShared) return cudaErrorInvalidValue;
  Stream& stream = stream_of(stream_handle);
  if (function.module->device != stream.name.device) return cudaErrorInvalidResourceHandle;
  Arguments arguments(*function.entry, addresses, extra);
  const std::string problem = launch_function(function, stream, shape, arguments.get());
  return problem.empty() ? cudaSuccess : failed(problem);
}

int attribute_of(CUfunction_attribute attribute) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return kMostThreads;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: return 32;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: return machine().major * 10 + machine().minor;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: return 48 << 10;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: return -1;
    default: return 0;
  }
}

} // namespace
} // namespace standin

using namespace standin;

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return driver_entry(__func__, [&] {
    if (module == nullptr || image == nullptr) return cudaErrorInvalidValue;
    *module = reinterpret_cast<CUmodule>(load_module(image, context_here().index));
    return cudaSuccess;
  });
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}

CUresult cuModuleLoad(CUmodule* module, const char* path) {
  return driver_entry(__func__, [&] {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream content;
    content << file.rdbuf();
    if (!file) return cudaErrorFileNotFound;
    *module = reinterpret_cast<CUmodule>(load_module(content.str().c_str(), context_here().index));
    return cudaSuccess;
  });
}

CUresult cuModuleUnload(CUmodule module) {
  return driver_entry(__func__, [&] {
    unload_module(module_of(module));
    return cudaSuccess;
  });
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return driver_entry(__func__, [&] {
    *function = reinterpret_cast<CUfunction>(find_function(module_of(module), name));
    return *function == nullptr ? cudaErrorSymbolNotFound : cudaSuccess;
  });
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
  return driver_entry(__func__, [&] {
    const auto [found, size] = find_variable(module_of(module), name);
    if (found == nullptr) return cudaErrorSymbolNotFound;
    if (address != nullptr) *address = reinterpret_cast<CUdeviceptr>(found);
    if (bytes != nullptr) *bytes = size;
    return cudaSuccess;
  });
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** arguments,
                        void** extra) {
  return driver_entry(__func__, [&] {
    const Shape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
    return launch(function, shape, stream, arguments, extra);
  });
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra) {
  return driver_entry(__func__, [&] {
    const Shape shape{{config->gridDimX, config->gridDimY, config->gridDimZ},
                      {config->blockDimX, config->blockDimY, config->blockDimZ},
                      config->sharedMemBytes};
    return launch(function, shape, config->hStream, arguments, extra);
  });
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, CUstream, void**) {
  return driver_entry(__func__, [&] {
    return failed("the kernel " + function_of(function).name +
                  " was launched as a cooperative one: the stand-in runs one block after the other, so blocks cannot "
                  "wait for each other");
  });
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  return driver_entry(__func__, [&] {
    function_of(function);
    *value = attribute_of(attribute);
    return cudaSuccess;
  });
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute, int) {
  return driver_entry(__func__, [&] {
    function_of(function);
    return cudaSuccess;
  });
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache) {
  return driver_entry(__func__, [&] {
    function_of(function);
    return cudaSuccess;
  });
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int block_size, size_t) {
  return driver_entry(__func__, [&] {
    function_of(function);
    if (block_size < 1 || block_size > int(kMostThreads)) return cudaErrorInvalidValue;
    *blocks = std::min(32, 2048 / block_size);
    return cudaSuccess;
  });
}

CUresult cuOccupancyMaxPotentialBlockSize(int* grid_size, int* block_size, CUfunction function, CUoccupancyB2DSize,
                                          size_t, int limit) {
  return driver_entry(__func__, [&] {
    function_of(function);
    *block_size = limit > 0 ? std::min(limit, int(kMostThreads)) : int(kMostThreads);
    *grid_size = machine().processors * std::max(1, 2048 / *block_size);
    return cudaSuccess;
  });
}
