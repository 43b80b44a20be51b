// What the files of this folder share: devices, streams, events and allocations of the stand-in, the state of a thread,
// and the frame around every function of CUDA. No other folder includes it; runtime.h is for them.
//
// Locks: each table has its own, and none is held while the watcher is called.
#pragma once

// CUDA's functions and those of runtime.h are exported; everything else is hidden by the compiler's flags.
#pragma GCC visibility push(default)
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "runtime.h"
#pragma GCC visibility pop

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace standin {

constexpr int kMaxDevices = 64; // a set of devices fits one word

// Ends a function of CUDA with this error.
struct Refused {
  cudaError_t error;
};

struct Capture; // capturing.cpp
struct CapturedEvent;

struct Stream {
  StreamName name;
  bool blocking = false; // it waits for the legacy default stream, and that waits for it
  unsigned flags = 0;
  int priority = 0;
  std::atomic<bool> alive{true};
  std::atomic<uint64_t> actions{0}; // how many, of blocking streams and legacy ones
  uint64_t legacy_seen = 0; // actions of the legacy stream that this one waits for; under the device's lock
  uint64_t seen_by_legacy = 0;
  std::atomic<bool> captures{false};
  std::shared_ptr<Capture> capture; // that it takes part in; under the lock of capturing.cpp
};

struct Event {
  EventState state;
  int device = 0;
  unsigned flags = 0;
  bool recorded = false;
  std::shared_ptr<CapturedEvent> captured; // null if it was recorded outside of captures
  std::chrono::steady_clock::time_point time;
};

struct Allocation : Memory {
  enum class Kind { kDevice, kPinned, kRegistered };
  Kind kind = Kind::kDevice;
  int owner = 0; // the device that was current
  unsigned flags = 0;
};

struct Device {
  int index = 0; // as the process sees it
  int physical = 0; // as NVML sees it
  std::atomic<bool> context{false};
  std::atomic<uint64_t> peers{0}; // devices whose memory this one has mapped
  std::atomic<size_t> used{0};
  unsigned flags = 0; // of the primary context
  Stream legacy;
  std::mutex lock;
  std::vector<Stream*> blocking; // alive, or with work that the legacy stream has not waited for
};

// ---- devices (machine.cpp, devices.cpp)

std::vector<std::unique_ptr<Device>>& devices(); // from then on the machine is fixed
bool is_used(); // whether there are any: asking does not make them
int device_count();
Device& device_at(int index); // throws Refused if there is none
size_t capacity_of(int device);
Link link_between(int from, int to);
// The current device of the thread, with its primary context, which is made if it was not there.
Device& context_here();
void make_context(Device& device);
std::string uuid_of(int physical); // 16 bytes
std::string uuid_text(int physical); // "GPU-..."
void set_current(int device); // as cudaSetDevice does

// ---- peers (peers.cpp)

bool has_mapped(int device, int peer);
cudaError_t can_be_peers(const Device& device, const Device& peer, int* can);
cudaError_t enable_peer(Device& device, Device& peer, unsigned flags);

// ---- streams (streams.cpp) and events (events.cpp)

Stream& stream_of(void* handle); // throws Refused
Stream& stream_named(StreamName name);
void* create_stream(unsigned flags, int priority);
void destroy_stream(void* handle);
// The implicit waits before an action on a stream: of the legacy default stream for blocking ones, and of them for it.
void order(Stream& stream);
// As `announce`, for functions of CUDA itself: throws Refused where CUDA refuses the work.
std::string announce_or_refuse(StreamName name, const char* what, const Part* parts, size_t count,
                               const CopyInfo* copy, Turn turn);
bool stream_is_done(Stream& stream);
void wait_for_stream(Stream& stream, const char* call); // the host
void wait_for_device(int device, const char* call);

void* create_event(unsigned flags);
void destroy_event(void* handle);
Event& event_of(void* handle); // throws Refused
void record_event(Event& event, Stream& stream, const void* caller);
bool event_is_done(const Event& event);
void synchronize(Event& event, const char* call); // the host waits
cudaError_t elapsed(float* milliseconds, Event& from, Event& to);
void wait_for_event(Stream& stream, Event& event);

// ---- memory (memory.cpp, pages.cpp)

char* take_pages(size_t bytes); // null if there are none; zeros
void give_back_pages(char* begin, size_t bytes); // from now on an access ends the process
cudaError_t allocate(void** address, size_t bytes);
cudaError_t release(void* address, const char* call);
cudaError_t allocate_host(void** address, size_t bytes, unsigned flags);
cudaError_t release_host(void* address, const char* call);
cudaError_t register_host(void* address, size_t bytes, unsigned flags);
cudaError_t unregister_host(void* address);
void memory_info(size_t* free, size_t* total); // of the current device
Allocation* allocation_of(const void* address);

// ---- copies (copies.cpp)

// Rows of bytes, one after another at `pitch`.
struct Rows {
  char* begin = nullptr;
  size_t pitch = 0;
};
struct Extent {
  size_t width = 0; // in bytes
  size_t height = 1;
};
cudaError_t copy(const char* call, Rows to, Rows from, Extent extent, cudaMemcpyKind kind, Stream& stream,
                 bool synchronous);
cudaError_t fill(const char* call, Rows to, Extent extent, uint32_t value, size_t value_bytes, Stream& stream);

// ---- kernels (kernels.cpp)

struct Launch {
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  size_t shared_bytes = 0;
};
std::vector<std::string> launched_kernels(bool forget); // that are not computed
cudaError_t launch_kernel(const std::string& mangled_name, const Launch& launch, void** arguments, Stream& stream);

// ---- the driver (driver.cpp)

void* driver_function(const std::string& name); // null if the stand-in does not have it

// ---- errors and the frame around CUDA's functions (errors.cpp, calls.cpp)

const char* error_name(int error); // the driver's; null if it has no such code
const char* error_text(int error); // without the thread's own text
void keep_untold(const std::string& message);
cudaError_t failed(const std::string& text); // what `fail` returns, as CUDA's type

struct Thread {
  int device = 0;
  bool bound = false; // a context is current: the driver's view
  bool in_host_function = false;
  cudaError_t last = cudaSuccess;
  std::string text; // of cudaErrorUnknown
  std::vector<Stream*> streams; // cudaStreamPerThread, by device
  std::vector<int> contexts; // below the current one, as the driver's stack; -1 is none
};
Thread& this_thread();

// How often a function of CUDA was called. Objects stay until the process ends.
struct CallCount {
  const char* name;
  std::atomic<uint64_t> calls{0};
  CallCount* next;
  explicit CallCount(const char* function);
};

bool in_child(); // a fork of a process that has used CUDA
void use_driver(); // marks that this process uses CUDA
void count_host_wait();

template <class Body>
cudaError_t guarded(const Body& body) {
  try {
    return body();
  } catch (const Refused& refused) {
    return refused.error;
  } catch (const std::exception& error) {
    return failed(error.what());
  }
}

// The frame of a function of the runtime. Every call has a type of its own for `body`, and so its own count.
template <class Body>
cudaError_t entry(const char* function, const Body& body) {
  auto& thread = this_thread();
  if (in_child()) {
    return thread.last = cudaErrorInitializationError;
  }
  static CallCount count(function);
  count.calls.fetch_add(1, std::memory_order_relaxed);
  use_driver();
  const auto error = thread.in_host_function ? cudaErrorNotPermitted : guarded(body);
  if (error != cudaSuccess) {
    thread.last = error;
  }
  return error;
}

// The frame of a function of the driver: its errors do not become the runtime's last one.
template <class Body>
CUresult driver_entry(const char* function, const Body& body) {
  if (in_child()) {
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  static CallCount count(function);
  count.calls.fetch_add(1, std::memory_order_relaxed);
  use_driver();
  if (this_thread().in_host_function) {
    return CUDA_ERROR_NOT_PERMITTED;
  }
  return static_cast<CUresult>(guarded(body)); // both have the same numbers for what the stand-in returns
}

// The same for functions that need a current context, which the driver does not make.
template <class Body>
CUresult in_context(const char* function, const Body& body) {
  return driver_entry(function, [&] { return this_thread().bound ? body() : cudaErrorDeviceUninitialized; });
}

} // namespace standin
