// What a module of kernels that was compiled for the host and the runtime that launches them say to each other. The
// shim beside this file builds the module's side, ../../runtime/modules.cpp reads it. Nobody else includes it. It knows
// no CUDA and no torch, so that both sides can include it first.
#pragma once

#include <cstddef>

namespace standin {

// A change of these structures needs a new number: modules are kept in caches.
constexpr unsigned kModuleVersion = 1;

// The first line of a module as text, which is handed out as PTX. After it come comments, then hexadecimal digits.
constexpr char kTextMark[] = "// no PTX, but a shared object for the host, of the stand-in for NVRTC";

// As CUDA's uint3 and dim3.
struct Triple {
  unsigned x, y, z;
};

// What the runtime does for the threads of a running kernel.
struct Engine {
  // Returns when all threads of the block that have not ended wait here.
  void (*wait_for_block)();
  // Returns when the lanes of the mask that have not ended wait here too.
  void (*wait_for_warp)(unsigned mask);
  // 32 bytes for each lane of the warp of the running thread, to hand values over between two waits.
  void* (*slot_of_lane)(unsigned lane);
  // The lanes of the running thread's warp that have not ended.
  unsigned (*lanes)();
  // Memory that is about to be read or written.
  void (*touch)(const void* address, size_t bytes, bool writes);
  // Ends the whole launch with an error. Does not return.
  void (*stop)(const char* why);
};

struct Parameter {
  size_t bytes, alignment;
  bool pointer;
};

struct Entry {
  const char* name; // in the source, with namespaces, or as a name expression says it
  const void* function;
  void (*run)(void** arguments); // one thread of the kernel; each argument is the address of a value
  size_t count; // of parameters
  const Parameter* parameters;
  const char* names; // the parameters as the source writes them
};

// Every module exports one, with the name `standin_module`. The runtime sets the places that it points to before it
// runs or resumes a thread. They are plain variables, so only one launch runs at a time in a process.
struct Module {
  unsigned version;
  const Entry* entries;
  size_t count;
  Triple* thread;
  Triple* block;
  Triple* block_size;
  Triple* grid_size;
  void** shared; // the dynamic shared memory of the running block
  const Engine** engine;
};

} // namespace standin
