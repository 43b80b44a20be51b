// Captured graphs: refused in CUDA's words. No stream is ever capturing.
#include "state.h"

using namespace standin;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return entry(__func__, [&] {
    stream_of(stream);
    return cudaErrorStreamCaptureUnsupported;
  });
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t*,
                                          const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode) {
  return entry(__func__, [&] {
    stream_of(stream);
    return cudaErrorStreamCaptureUnsupported;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return entry(__func__, [&] {
    stream_of(stream);
    *graph = nullptr;
    return cudaErrorIllegalState;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return entry(__func__, [&] {
    stream_of(stream);
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long*,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return entry(__func__, [&] {
    stream_of(stream);
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode own = cudaStreamCaptureModeGlobal;
  return entry(__func__, [&] {
    if (*mode < cudaStreamCaptureModeGlobal || *mode > cudaStreamCaptureModeRelaxed) {
      return cudaErrorInvalidValue;
    }
    std::swap(own, *mode);
    return cudaSuccess;
  });
}
