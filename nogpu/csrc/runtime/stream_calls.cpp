// The functions of CUDA's runtime about streams. streams.cpp does it.
#include "capturing.h"

using namespace standin;

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return entry(__func__, [&] {
    *stream = static_cast<cudaStream_t>(create_stream(cudaStreamDefault, 0));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return entry(__func__, [&] {
    *stream = static_cast<cudaStream_t>(create_stream(flags, 0));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return entry(__func__, [&] {
    *stream = static_cast<cudaStream_t>(create_stream(flags, priority));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return entry(__func__, [&] {
    destroy_stream(stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return entry(__func__, [&] {
    refuse_while_capturing();
    wait_for_stream(stream_of(stream), "cudaStreamSynchronize");
    return cudaSuccess;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return entry(__func__, [&] {
    refuse_while_capturing();
    return stream_is_done(stream_of(stream)) ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return entry(__func__, [&] {
    *priority = stream_of(stream).priority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  return entry(__func__, [&] {
    *flags = stream_of(stream).flags;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  return entry(__func__, [&] {
    const auto name = stream_of(handle).name;
    *id = static_cast<unsigned long long>(name.device) << 32 | name.number;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  return entry(__func__, [&] {
    *device = stream_of(stream).name.device;
    return cudaSuccess;
  });
}

namespace {

// Runs a function of the program between the work of a stream. It runs in the calling thread, which may hold locks that
// another thread would wait for; the watcher gives it a lane of its own.
template <class Function>
void run_host_function(Stream& stream, const Function& function) {
  refuse_if_captured(stream); // CUDA would keep it
  order(stream);
  auto* told = watcher();
  if (told != nullptr) {
    told->host_function(stream.name, true);
  }
  this_thread().in_host_function = true;
  function();
  this_thread().in_host_function = false;
  if (told != nullptr) {
    told->host_function(stream.name, false);
  }
}

} // namespace

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return entry(__func__, [&] {
    run_host_function(stream_of(stream), [&] { function(argument); });
    return cudaSuccess;
  });
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* argument, unsigned flags) {
  return entry(__func__, [&] {
    if (flags != 0) {
      return cudaErrorInvalidValue;
    }
    run_host_function(stream_of(stream), [&] { callback(stream, cudaSuccess, argument); });
    return cudaSuccess;
  });
}
