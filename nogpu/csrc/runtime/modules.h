// Modules of kernels that the stand-in for NVRTC has compiled: loading, finding kernels, and launching them with what
// the watcher has to know. module_calls.cpp is the driver's face of it, and nobody else includes this.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "blocks.h"
#include "state.h"

namespace standin {

struct LoadedModule;

// What a CUfunction points to. It stays until the process ends.
struct LoadedFunction {
  LoadedModule* module;
  const Entry* entry;
  std::string name;
  std::vector<std::string> parameters; // their names
};

// What a CUmodule points to. It belongs to a device, as its context.
struct LoadedModule {
  int device = 0;
  void* handle = nullptr; // of the dynamic loader; null after it was unloaded
  Module* kernels = nullptr;
  std::vector<std::pair<const void*, size_t>> segments; // in memory, for static variables
  std::map<std::string, std::unique_ptr<LoadedFunction>> functions;
};

// Loads a shared object from its bytes, or a text of it (see kTextMark), for a device. Throws with a sentence for what
// is none of the stand-in's, as cubins and PTX of a real compiler.
LoadedModule* load_module(const void* image, int device);
void unload_module(LoadedModule& module);
LoadedModule& module_of(void* handle); // throws Refused

// By the name in the source, by a name expression, or by the compiled name. Null if there is none.
LoadedFunction* find_function(LoadedModule& module, const std::string& name);
LoadedFunction& function_of(void* handle); // throws Refused
// Of a variable: its address and size. A null address if there is none.
std::pair<void*, size_t> find_variable(LoadedModule& module, const std::string& name);

// Waits for what the stream has to wait for, runs the kernel, then tells the watcher what it has touched. Returns what
// is wrong, or an empty text.
std::string launch_function(LoadedFunction& function, Stream& stream, const Shape& shape, void** arguments);

} // namespace standin
