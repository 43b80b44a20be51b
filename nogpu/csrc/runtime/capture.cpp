// The functions of CUDA's runtime about captures and graphs. capturing.cpp and graphs.cpp do it. Graphs are made by
// captures only, and cannot be changed.
#include "capturing.h"
#include "graphs.h"

using namespace standin;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return entry(__func__, [&] {
    begin_capture(stream_of(stream), mode);
    return cudaSuccess;
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
    *graph = nullptr;
    *graph = static_cast<cudaGraph_t>(add_graph(end_capture(stream_of(stream))));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return entry(__func__, [&] {
    *status = capture_status(stream_of(stream), nullptr, nullptr);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  return entry(__func__, [&] {
    *status = capture_status(stream_of(stream), id, graph);
    const auto clear = [](auto* answer) {
      if (answer != nullptr) {
        *answer = {};
      }
    };
    clear(dependencies);
    clear(edges);
    clear(count);
    return cudaSuccess;
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return entry(__func__, [&] {
    if (*mode < cudaStreamCaptureModeGlobal || *mode > cudaStreamCaptureModeRelaxed) {
      return cudaErrorInvalidValue;
    }
    exchange_mode(*mode);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long) {
  return entry(__func__, [&] {
    *instance = static_cast<cudaGraphExec_t>(instantiate(graph_of(graph)));
    return cudaSuccess;
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
  return entry(__func__, [&] { return launch_graph(instance, stream_of(stream)); });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return entry(__func__, [&] {
    destroy_graph(graph);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
  return entry(__func__, [&] {
    destroy_instance(instance);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* count) {
  return entry(__func__, [&] {
    const auto graph = graph_of(handle);
    for (size_t i = 0; nodes != nullptr && i < *count; ++i) {
      nodes[i] = i < graph->pieces.size() ? reinterpret_cast<cudaGraphNode_t>(&graph->pieces[i]) : nullptr;
    }
    *count = nodes == nullptr ? graph->pieces.size() : std::min(*count, graph->pieces.size());
    return cudaSuccess;
  });
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* pointer, cudaHostFn_t destroy, unsigned references,
                                 unsigned) {
  return entry(__func__, [&] {
    *object = reinterpret_cast<cudaUserObject_t>(new UserObject(pointer, destroy, references));
    return cudaSuccess;
  });
}

cudaError_t cudaUserObjectRetain(cudaUserObject_t object, unsigned count) {
  return entry(__func__, [&] {
    reinterpret_cast<UserObject*>(object)->retain(count);
    return cudaSuccess;
  });
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  return entry(__func__, [&] {
    reinterpret_cast<UserObject*>(object)->release(count);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t handle, cudaUserObject_t object, unsigned count, unsigned flags) {
  return entry(__func__, [&] {
    const auto graph = graph_of(handle);
    auto* const kept = reinterpret_cast<UserObject*>(object);
    if ((flags & cudaGraphUserObjectMove) == 0) {
      kept->retain(count);
    }
    graph->retained.emplace_back(kept, count);
    return cudaSuccess;
  });
}
