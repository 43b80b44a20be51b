// Peer access: which devices have mapped the memory of which others.
#include "state.h"

namespace standin {

namespace {

uint64_t bit(int device) {
  return uint64_t{1} << device;
}

bool can_access(int device, int peer) {
  return device != peer && link_between(device, peer) != Link::kMissing;
}

} // namespace

bool has_mapped(int device, int peer) {
  return device == peer || (device_at(device).peers.load(std::memory_order_relaxed) & bit(peer)) != 0;
}

cudaError_t can_be_peers(const Device& device, const Device& peer, int* can) {
  *can = can_access(device.index, peer.index);
  return cudaSuccess;
}

// It makes the context of the other device too.
cudaError_t enable_peer(Device& device, Device& peer, unsigned flags) {
  if (flags != 0) {
    return cudaErrorInvalidValue;
  }
  if (device.index == peer.index) {
    return cudaErrorInvalidDevice;
  }
  if (!can_access(device.index, peer.index)) {
    return cudaErrorPeerAccessUnsupported;
  }
  make_context(peer);
  return device.peers.fetch_or(bit(peer.index)) & bit(peer.index) ? cudaErrorPeerAccessAlreadyEnabled : cudaSuccess;
}

std::string check_access(int device, const char* name, const Part* parts, size_t count) {
  for (const auto* part = parts; part != parts + count; ++part) {
    const auto* memory = part->memory;
    if (memory != nullptr && memory->device >= 0 && !has_mapped(device, memory->device)) {
      const auto here = "cuda:" + std::to_string(device), there = "cuda:" + std::to_string(memory->device);
      return std::string(name) + " on " + here + (part->writes ? " writes to" : " reads") + " memory of " + there +
          " ('" + part->argument + "'), which " + here + " has not mapped: a GPU ends the process with an illegal " +
          "address. Copy it first, or let the devices be peers (cudaDeviceEnablePeerAccess)";
    }
  }
  return {};
}

} // namespace standin

using namespace standin;

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return entry(__func__, [&] { return can_be_peers(device_at(device), device_at(peer), can); });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  return entry(__func__, [&] {
    auto& other = device_at(peer);
    return enable_peer(context_here(), other, flags);
  });
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  return entry(__func__, [&] {
    device_at(peer);
    auto& device = context_here();
    return device.peers.fetch_and(~bit(peer)) & bit(peer) ? cudaSuccess : cudaErrorPeerAccessNotEnabled;
  });
}

cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int device, int peer) {
  return entry(__func__, [&] {
    device_at(device);
    device_at(peer);
    if (device == peer) {
      return cudaErrorInvalidDevice;
    }
    const auto can = can_access(device, peer);
    switch (attribute) {
      case cudaDevP2PAttrPerformanceRank: *value = 0; return cudaSuccess;
      case cudaDevP2PAttrAccessSupported:
      case cudaDevP2PAttrNativeAtomicSupported:
      case cudaDevP2PAttrCudaArrayAccessSupported: *value = can; return cudaSuccess;
      default: return cudaErrorInvalidValue;
    }
  });
}
