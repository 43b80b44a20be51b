// Copies and fills. They are done in the turn of their stream; the watcher is told on which stream, and where the host
// waits.
//
// What the host waits for follows CUDA's page on synchronisation: copies to pageable memory of the host are done when
// the call returns, those from it leave the memory free at once, those between devices never hold up the host.
#include <cstring>

#include "capturing.h"

namespace standin {

namespace {

// One end of a copy.
struct Side {
  Rows rows;
  Allocation* allocation = nullptr; // null: pageable memory
  int device() const {
    return allocation == nullptr ? -1 : allocation->device;
  }
  bool pinned() const {
    return allocation != nullptr && allocation->device < 0;
  }
  bool on_host() const {
    return device() < 0;
  }
};

size_t reach(Rows rows, Extent extent) {
  return rows.pitch * (extent.height - 1) + extent.width;
}

// Refuses what leads out of an allocation.
Side side_of(Rows rows, Extent extent) {
  Side side{rows, allocation_of(rows.begin)};
  if (extent.height > 1 && rows.pitch < extent.width) {
    throw Refused{cudaErrorInvalidPitchValue};
  }
  if (side.allocation != nullptr) {
    const auto begin = static_cast<size_t>(rows.begin - side.allocation->begin);
    if (reach(rows, extent) > side.allocation->bytes - begin) {
      throw Refused{cudaErrorInvalidValue};
    }
  }
  return side;
}

// Pinned memory is at home on both sides: its address is one of the devices too.
void check_direction(const Side& to, const Side& from, cudaMemcpyKind kind) {
  const auto host = [](const Side& side) { return side.on_host(); };
  const auto device = [](const Side& side) { return side.allocation != nullptr; };
  bool fits = false;
  switch (kind) {
    case cudaMemcpyHostToHost: fits = host(to) && host(from); break;
    case cudaMemcpyHostToDevice: fits = device(to) && host(from); break;
    case cudaMemcpyDeviceToHost: fits = host(to) && device(from); break;
    case cudaMemcpyDeviceToDevice: fits = device(to) && device(from); break;
    case cudaMemcpyDefault: fits = true; break;
    default: throw Refused{cudaErrorInvalidMemcpyDirection};
  }
  if (!fits) {
    throw Refused{cudaErrorInvalidValue};
  }
}

void add_parts(std::vector<Part>& parts, const Side& side, Extent extent, bool writes, const char* argument) {
  if (side.allocation == nullptr) {
    return;
  }
  auto begin = static_cast<size_t>(side.rows.begin - side.allocation->begin);
  const auto whole = extent.height == 1 || side.rows.pitch == extent.width;
  const Extent pieces = whole ? Extent{extent.width * extent.height, 1} : extent;
  for (size_t row = 0; row < pieces.height; ++row, begin += side.rows.pitch) {
    parts.push_back({side.allocation, begin, begin + pieces.width, writes, argument});
  }
}

// A broken link delivers other bytes. Copies take it where one device has mapped the other.
bool is_broken(int from, int to) {
  return from >= 0 && to >= 0 && from != to && link_between(from, to) == Link::kBroken &&
      (has_mapped(from, to) || has_mapped(to, from));
}

void move(Rows to, Rows from, Extent extent, bool broken) {
  for (size_t row = 0; row < extent.height; ++row, to.begin += to.pitch, from.begin += from.pitch) {
    std::memmove(to.begin, from.begin, extent.width);
    for (size_t i = 0; broken && i < extent.width; ++i) {
      to.begin[i] = static_cast<char>(~to.begin[i]);
    }
  }
}

void fill_rows(Rows to, Extent extent, uint32_t value, size_t value_bytes) {
  for (; extent.height > 0; --extent.height, to.begin += to.pitch) {
    if (value_bytes == 1) {
      std::memset(to.begin, static_cast<int>(value), extent.width);
      continue;
    }
    for (size_t i = 0; i < extent.width; i += value_bytes) {
      std::memcpy(to.begin + i, &value, value_bytes);
    }
  }
}

enum class HostWait { kNone, kBefore, kAfter };

HostWait host_wait(const Side& to, const Side& from, bool synchronous) {
  if (to.on_host()) {
    return synchronous || !to.pinned() || (from.on_host() && !from.pinned()) ? HostWait::kAfter : HostWait::kNone;
  }
  if (!synchronous || !from.on_host()) {
    return HostWait::kNone;
  }
  return from.pinned() ? HostWait::kAfter : HostWait::kBefore; // pageable memory is staged when the stream is empty
}

} // namespace

cudaError_t copy(const char* call, Rows to_rows, Rows from_rows, Extent extent, cudaMemcpyKind kind, Stream& stream,
                 bool synchronous) {
  if (extent.width == 0 || extent.height == 0) {
    return cudaSuccess;
  }
  if (to_rows.begin == nullptr || from_rows.begin == nullptr) {
    return cudaErrorInvalidValue;
  }
  const auto to = side_of(to_rows, extent), from = side_of(from_rows, extent);
  check_direction(to, from, kind);
  std::vector<Part> parts;
  add_parts(parts, from, extent, false, "source");
  add_parts(parts, to, extent, true, "destination");
  const auto wait = host_wait(to, from, synchronous);
  if (wait != HostWait::kNone || from.allocation == nullptr) {
    refuse_if_captured(stream);
  }
  if (wait == HostWait::kBefore) {
    wait_for_stream(stream, call);
  }
  const CopyInfo info{from.device(), to.device(), extent.width * extent.height};
  const auto wrong = announce_or_refuse(stream.name, call, parts.data(), parts.size(), &info, Turn::kLater);
  if (!wrong.empty()) {
    return failed(wrong);
  }
  const bool broken = is_broken(from.device(), to.device());
  in_turn(stream.name, [=] { move(to_rows, from_rows, extent, broken); });
  if (wait == HostWait::kAfter) {
    wait_for_stream(stream, call);
  }
  return cudaSuccess;
}

cudaError_t fill(const char* call, Rows to_rows, Extent extent, uint32_t value, size_t value_bytes, Stream& stream) {
  if (extent.width == 0 || extent.height == 0) {
    return cudaSuccess;
  }
  const auto to = side_of(to_rows, extent);
  if (to.allocation == nullptr || (!to.on_host() && !has_mapped(stream.name.device, to.device()))) {
    return cudaErrorInvalidValue;
  }
  std::vector<Part> parts;
  add_parts(parts, to, extent, true, "destination");
  const auto wrong = announce_or_refuse(stream.name, call, parts.data(), parts.size(), nullptr, Turn::kLater);
  if (!wrong.empty()) {
    return failed(wrong);
  }
  in_turn(stream.name, [=] { fill_rows(to_rows, extent, value, value_bytes); });
  return cudaSuccess;
}

} // namespace standin
