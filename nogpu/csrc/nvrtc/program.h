// A program that NVRTC's callers compile: here it becomes a shared object for the host, whose bytes are handed out as
// the cubin. It compiles; it loads and runs nothing, see ../runtime/modules.cpp. Only nvrtc.cpp makes programs.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace standin {

// Where the tools are. To be set before the first program is compiled.
struct Tools {
  std::vector<std::string> compiler; // of C++, a command with its first arguments
  std::string shim; // the folder of kernel.h
  std::vector<std::string> includes; // folders with CUDA's headers
};
void set_tools(Tools tools);

struct Program {
  std::string source;
  std::string name;
  std::vector<std::pair<std::string, std::string>> headers; // name, content
  std::vector<std::string> expressions;

  std::string log;
  std::string object; // the shared object; empty before it was compiled
  bool empty = false; // the source has nothing in it

  // Returns false if it does not compile; the log says why.
  bool compile(const std::vector<std::string>& options);
};

// The compiler's version, and the shim's: what a cache of compiled kernels has to depend on.
std::string tools_version();

} // namespace standin
