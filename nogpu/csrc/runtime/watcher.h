// What the stand-in for CUDA's runtime tells a watcher: launches with the memory that they touch, and everything that
// orders launches. The watcher is the front end in ../cuda, which has the clocks. No torch and no CUDA in this header.
//
// Work is done when it is launched, in the order of the calls, which is one that CUDA allows too. The watcher says what a
// GPU might have done in another order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace standin {

// A stream of a device. Number 0 is the legacy default stream. A number is never used again in a process.
struct StreamName {
  int device = 0;
  uint32_t number = 0;
};

// An allocation, or host memory that was registered. Its address does not change while it exists.
struct Memory {
  char* begin = nullptr;
  size_t bytes = 0;
  int device = -1; // -1: pinned host memory
  void* watched = nullptr; // the watcher's own
};

// A part of an allocation that a launch reads or writes.
struct Part {
  Memory* memory = nullptr;
  size_t begin = 0; // in bytes, in the allocation
  size_t end = 0;
  bool writes = false;
  const char* argument = ""; // its name, for messages
};

// What an event has recorded.
struct EventState {
  StreamName stream;
  const void* caller = nullptr; // the code that has recorded it
  void* watched = nullptr; // the watcher's own
};

// How much a copy has moved, for counts and timelines; -1 is the host.
struct CopyInfo {
  int from = -1;
  int to = -1;
  size_t bytes = 0;
};

// Any thread may call all functions. The runtime holds none of its locks when it calls, so they may call Python.
class Watcher {
 public:
  virtual ~Watcher() = default;

  // Work on a stream that touches memory. Called before the work is done. Returns a message if something is wrong: then
  // the work is not done, and the call returns an error with that text.
  virtual std::string launch(StreamName stream, const char* name, const Part* parts, size_t count,
                             const CopyInfo* copy) = 0;

  // The same for work that is captured. It is not done now. The function that is returned tells of it at each launch of
  // the graph, on the stream that it gets, and returns what `launch` would. It may be called by any thread.
  virtual std::function<std::string(StreamName)> keep(StreamName stream, const char* name, const Part* parts,
                                                      size_t count, const CopyInfo* copy) {
    const CopyInfo info = copy == nullptr ? CopyInfo{} : *copy;
    return [=, name = std::string(name), parts = std::vector<Part>(parts, parts + count)](StreamName launched_on) {
      return launch(launched_on, name.c_str(), parts.data(), count, copy == nullptr ? nullptr : &info);
    };
  }

  // The calling thread launches a graph: between the two calls it tells of what was kept for it.
  virtual void launches_graph(bool begins) {
    (void)begins;
  }

  // A kernel is about to run whose memory is known only when it has run: `launch` follows then. By default it may run.
  virtual std::string begins(StreamName /*stream*/, const char* /*name*/) { return {}; }

  virtual void recorded(EventState& event, StreamName stream) = 0;
  virtual void stream_waits(StreamName stream, const EventState& event) = 0;
  // `later` waits for what `earlier` has been given so far: the implicit waits of the legacy default stream.
  virtual void stream_waits_for_stream(StreamName later, StreamName earlier) = 0;
  // The host has waited. `call` is the function's name: cudaStreamSynchronize, cudaMemcpy, cudaFree, ...
  virtual void host_waited(const EventState& event, const char* call) = 0;
  virtual void host_waited_for_stream(StreamName stream, const char* call) = 0;
  virtual void host_waited_for_device(int device, const char* call) = 0;
  // The host asks if the work is done. False is an honest answer unless the host knows better.
  virtual bool host_asks(const EventState& event) = 0;
  virtual bool host_asks_stream(StreamName stream) = 0;

  // A function of the program runs between the work of a stream (cudaLaunchHostFunc): after all that the stream has,
  // and before all that it gets. The calling thread runs it in place of one of the driver, between these two calls.
  virtual void host_function(StreamName stream, bool begins) {
    (void)stream, (void)begins;
  }

  // Before an event is destroyed or recorded again. What is older than the watcher has no `watched`; so in `freed`.
  virtual void forget(EventState& event) = 0;
  virtual void allocated(Memory& memory) = 0;
  // A device's memory is about to be freed, and the host has not waited for the device yet.
  virtual void freeing(Memory& /*memory*/) {}
  virtual void freed(Memory& memory) = 0;
};

} // namespace standin
