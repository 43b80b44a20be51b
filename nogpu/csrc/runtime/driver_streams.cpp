// The driver's functions of streams and events. Their handles are those of the runtime.
#include "state.h"

using namespace standin;

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return in_context(__func__, [&] {
    *stream = static_cast<CUstream>(create_stream(flags, 0));
    return cudaSuccess;
  });
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return in_context(__func__, [&] {
    *stream = static_cast<CUstream>(create_stream(flags, priority));
    return cudaSuccess;
  });
}

CUresult cuStreamDestroy(CUstream stream) {
  return in_context(__func__, [&] {
    destroy_stream(stream);
    return cudaSuccess;
  });
}

CUresult cuStreamSynchronize(CUstream stream) {
  return in_context(__func__, [&] {
    wait_for_stream(stream_of(stream), "cuStreamSynchronize");
    return cudaSuccess;
  });
}

CUresult cuStreamQuery(CUstream stream) {
  return in_context(__func__, [&] { return stream_is_done(stream_of(stream)) ? cudaSuccess : cudaErrorNotReady; });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return in_context(__func__, [&] {
    if ((flags & ~static_cast<unsigned>(CU_EVENT_WAIT_EXTERNAL)) != 0) {
      return cudaErrorInvalidValue;
    }
    wait_for_event(stream_of(stream), event_of(event));
    return cudaSuccess;
  });
}

CUresult cuStreamGetPriority(CUstream stream, int* priority) {
  return in_context(__func__, [&] {
    *priority = stream_of(stream).priority;
    return cudaSuccess;
  });
}

CUresult cuStreamGetFlags(CUstream stream, unsigned* flags) {
  return in_context(__func__, [&] {
    *flags = stream_of(stream).flags;
    return cudaSuccess;
  });
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  return in_context(__func__, [&] {
    *context = reinterpret_cast<CUcontext>(&device_at(stream_of(stream).name.device));
    return cudaSuccess;
  });
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return in_context(__func__, [&] {
    stream_of(stream);
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return cudaSuccess;
  });
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  return in_context(__func__, [&] {
    *event = static_cast<CUevent>(create_event(flags));
    return cudaSuccess;
  });
}

CUresult cuEventDestroy(CUevent event) {
  return in_context(__func__, [&] {
    destroy_event(event);
    return cudaSuccess;
  });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  return in_context(__func__, [&] {
    record_event(event_of(event), stream_of(stream), nullptr);
    return cudaSuccess;
  });
}

CUresult cuEventQuery(CUevent event) {
  return in_context(__func__, [&] { return event_is_done(event_of(event)) ? cudaSuccess : cudaErrorNotReady; });
}

CUresult cuEventSynchronize(CUevent event) {
  return in_context(__func__, [&] {
    synchronize(event_of(event), "cuEventSynchronize");
    return cudaSuccess;
  });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) {
  return in_context(__func__, [&] { return elapsed(milliseconds, event_of(from), event_of(to)); });
}
