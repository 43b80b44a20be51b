// Kernels of device code. The stand-in cannot run them. It keeps their names, runs the function of the host that was
// added for a name, and otherwise refuses the launch with an error that names the kernel: a kernel that was not
// computed never looks like one that ran.
#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "state.h"

namespace standin {

namespace {

struct Kernel {
  std::string name; // mangled
};

std::mutex lock;
// By the address that the host's code launches. Kernels stay until the process ends.
std::map<const void*, Kernel*>& kernels = *new std::map<const void*, Kernel*>;
std::set<Kernel*>& handles = *new std::set<Kernel*>;
std::map<const void*, std::string>& variables = *new std::map<const void*, std::string>;
std::map<std::string, HostKernel>& computed = *new std::map<std::string, HostKernel>;
std::vector<std::string>& not_computed = *new std::vector<std::string>;

std::string demangled(const std::string& name) {
  int status = 0;
  auto* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

HostKernel find_computed(const std::string& name) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto found = computed.find(name);
  return found == computed.end() ? nullptr : found->second;
}

// Launches name a kernel by the address in the host's code or by what __cudaGetKernel returned.
Kernel& kernel_of(const void* function) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto found = kernels.find(function);
  if (found != kernels.end()) {
    return *found->second;
  }
  const auto handle = handles.find(static_cast<Kernel*>(const_cast<void*>(function)));
  if (handle == handles.end()) {
    throw Refused{cudaErrorInvalidDeviceFunction};
  }
  return **handle;
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                   cudaStream_t stream) {
  const Launch shape{{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes};
  return launch_kernel(kernel_of(function).name, shape, arguments, stream_of(stream));
}

} // namespace

void add_kernel(const std::string& mangled_name, HostKernel kernel) {
  const std::lock_guard<std::mutex> guard(lock);
  computed[mangled_name] = kernel;
}

std::vector<std::string> launched_kernels(bool forget) {
  const std::lock_guard<std::mutex> guard(lock);
  auto result = not_computed;
  if (forget) {
    not_computed.clear();
  }
  return result;
}

cudaError_t launch_kernel(const std::string& mangled_name, const Launch& launch, void** arguments, Stream& stream) {
  const auto threads = size_t{launch.block[0]} * launch.block[1] * launch.block[2];
  const auto blocks = size_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
  if (threads == 0 || threads > 1024 || blocks == 0) {
    return cudaErrorInvalidConfiguration;
  }
  if (stream.name.device != this_thread().device) {
    return cudaErrorInvalidResourceHandle;
  }
  if (const auto kernel = find_computed(mangled_name)) {
    kernel(stream.name, arguments, launch.grid, launch.block, launch.shared_bytes);
    return cudaSuccess;
  }
  const auto name = demangled(mangled_name);
  {
    const std::lock_guard<std::mutex> guard(lock);
    not_computed.push_back(name);
  }
  return failed("the stand-in for CUDA does not compute the kernel " + name);
}

} // namespace standin

using namespace standin;

extern "C" {

#pragma GCC visibility push(default)

// What nvcc's compiled code calls before main and around <<<>>>.

void** __cudaRegisterFatBinary(void*) {
  static void* binary = nullptr;
  return &binary;
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}

char __cudaInitModule(void**) {
  return 1;
}

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  const std::lock_guard<std::mutex> guard(lock);
  auto& kernel = kernels[function];
  if (kernel == nullptr) {
    kernel = new Kernel{name};
    handles.insert(kernel);
  }
}

void __cudaRegisterVar(void**, char* variable, char*, const char* name, int, size_t, int, int) {
  const std::lock_guard<std::mutex> guard(lock);
  variables[variable] = name;
}

void __cudaRegisterManagedVar(void**, void** variable, char*, const char* name, int, size_t, int, int) {
  const std::lock_guard<std::mutex> guard(lock);
  variables[variable] = name;
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};

static thread_local std::vector<Configuration> configurations;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (configurations.empty()) {
    return this_thread().last = cudaErrorMissingConfiguration;
  }
  const auto top = configurations.back();
  configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared_bytes = top.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = top.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return entry(__func__, [&] {
    *kernel = reinterpret_cast<cudaKernel_t>(&kernel_of(function));
    return cudaSuccess;
  });
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                               cudaStream_t stream) {
  return entry(__func__, [&] { return launch(kernel, grid, block, arguments, shared_bytes, stream); });
}

#pragma GCC visibility pop

} // extern "C"

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  return entry(__func__, [&] { return launch(function, grid, block, arguments, shared_bytes, stream); });
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
  return entry(__func__, [&] { return launch(function, grid, block, arguments, shared_bytes, stream); });
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void** arguments) {
  return entry(__func__, [&] {
    return launch(function, configuration->gridDim, configuration->blockDim, arguments, configuration->dynamicSmemBytes,
                  configuration->stream);
  });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  return entry(__func__, [&] {
    context_here();
    kernel_of(function);
    std::memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = machine().major * 10 + machine().minor;
    return cudaSuccess;
  });
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute, int) {
  return entry(__func__, [&] {
    context_here();
    kernel_of(function);
    return cudaSuccess;
  });
}

cudaError_t cudaFuncGetName(const char** name, const void* function) {
  return entry(__func__, [&] {
    *name = kernel_of(function).name.c_str();
    return cudaSuccess;
  });
}

// Enough of them fill a processor's 2048 threads.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                                   size_t, unsigned) {
  return entry(__func__, [&] {
    context_here();
    kernel_of(function);
    *blocks = threads < 1 || threads > 1024 ? 0 : std::min(32, 2048 / threads);
    return threads < 1 ? cudaErrorInvalidValue : cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                          size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared_bytes, 0);
}

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  return entry(__func__, [&] {
    *address = nullptr;
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = variables.find(symbol);
    return found == variables.end()
        ? cudaErrorInvalidSymbol
        : failed("the stand-in for CUDA does not have the variable " + demangled(found->second) + " of device code");
  });
}
