// The functions of CUDA's runtime that copy and fill. copies.cpp does it.
#include "state.h"

using namespace standin;

namespace {

Rows rows(const void* begin, size_t pitch = 0) {
  return {const_cast<char*>(static_cast<const char*>(begin)), pitch};
}

bool owns(int device, const void* address) {
  const auto* allocation = allocation_of(address);
  return allocation != nullptr && allocation->device == device;
}

cudaError_t copy_peer(const char* call, void* to, int to_device, const void* from, int from_device, size_t bytes,
                      cudaStream_t stream) {
  device_at(to_device);
  device_at(from_device);
  if (bytes > 0 && (!owns(to_device, to) || !owns(from_device, from))) {
    return cudaErrorInvalidValue;
  }
  return copy(call, rows(to), rows(from), {bytes}, cudaMemcpyDeviceToDevice, stream_of(stream), false);
}

// The planes of a box one after another.
cudaError_t copy_box(const char* call, const cudaMemcpy3DParms& box, cudaStream_t stream, bool synchronous) {
  if (box.srcArray != nullptr || box.dstArray != nullptr) {
    return failed(std::string(call) + ": the stand-in for CUDA has no arrays for textures; copy from memory to memory");
  }
  const auto begin = [](const cudaPitchedPtr& memory, const cudaPos& position, size_t plane) {
    return static_cast<char*>(memory.ptr) + (position.z + plane) * memory.pitch * memory.ysize +
        position.y * memory.pitch + position.x;
  };
  for (size_t plane = 0; plane < box.extent.depth; ++plane) {
    const auto error = copy(call, rows(begin(box.dstPtr, box.dstPos, plane), box.dstPtr.pitch),
                            rows(begin(box.srcPtr, box.srcPos, plane), box.srcPtr.pitch),
                            {box.extent.width, box.extent.height}, box.kind, stream_of(stream), synchronous);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

} // namespace

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return entry(__func__, [&] {
    return copy("cudaMemcpy", rows(to), rows(from), {bytes}, kind, stream_of(nullptr), true);
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return entry(__func__, [&] {
    return copy("cudaMemcpyAsync", rows(to), rows(from), {bytes}, kind, stream_of(stream), false);
  });
}

cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device, size_t bytes) {
  return entry(__func__, [&] { return copy_peer("cudaMemcpyPeer", to, to_device, from, from_device, bytes, nullptr); });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                cudaStream_t stream) {
  return entry(__func__, [&] {
    return copy_peer("cudaMemcpyPeerAsync", to, to_device, from, from_device, bytes, stream);
  });
}

cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
  return entry(__func__, [&] {
    return copy("cudaMemcpy2D", rows(to, to_pitch), rows(from, from_pitch), {width, height}, kind, stream_of(nullptr),
                true);
  });
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return entry(__func__, [&] {
    return copy("cudaMemcpy2DAsync", rows(to, to_pitch), rows(from, from_pitch), {width, height}, kind,
                stream_of(stream), false);
  });
}

cudaError_t cudaMemcpy3D(const cudaMemcpy3DParms* box) {
  return entry(__func__, [&] { return copy_box("cudaMemcpy3D", *box, nullptr, true); });
}

cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* box, cudaStream_t stream) {
  return entry(__func__, [&] { return copy_box("cudaMemcpy3DAsync", *box, stream, false); });
}

// It does not hold up the host: only memory of the host does, which a device fills when its turn comes.
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return entry(__func__, [&] {
    const auto* allocation = allocation_of(to);
    auto& stream = stream_of(nullptr);
    const auto error = fill("cudaMemset", rows(to), {bytes}, static_cast<uint32_t>(value), 1, stream);
    if (error == cudaSuccess && bytes > 0 && allocation->device < 0) {
      wait_for_stream(stream, "cudaMemset");
    }
    return error;
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return entry(__func__, [&] {
    return fill("cudaMemsetAsync", rows(to), {bytes}, static_cast<uint32_t>(value), 1, stream_of(stream));
  });
}

cudaError_t cudaMemset2D(void* to, size_t pitch, int value, size_t width, size_t height) {
  return entry(__func__, [&] {
    return fill("cudaMemset2D", rows(to, pitch), {width, height}, static_cast<uint32_t>(value), 1, stream_of(nullptr));
  });
}

cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
  return entry(__func__, [&] {
    return fill("cudaMemset2DAsync", rows(to, pitch), {width, height}, static_cast<uint32_t>(value), 1,
                stream_of(stream));
  });
}
