#include "call.h"

#include "declarations.h"

namespace nccl {
namespace {

struct Dtype {
  const char* name;
  size_t size;
};
constexpr Dtype kDtypes[] = {{"int8", 1},    {"uint8", 1},   {"int32", 4},   {"uint32", 4},
                             {"int64", 8},   {"uint64", 8},  {"float16", 2}, {"float32", 4},
                             {"float64", 8}, {"bfloat16", 2}, {"float8_e4m3", 1}, {"float8_e5m2", 1}};
constexpr const char* kOps[] = {"sum", "product", "maximum", "minimum", "average", "sum of multiples"};
constexpr const char* kNames[] = {"ncclAllReduce", "ncclBroadcast", "ncclReduce",  "ncclAllGather",
                                  "ncclReduceScatter", "ncclAlltoAll", "ncclGather", "ncclScatter",
                                  "ncclSend",      "ncclRecv",      "ncclCommSplit"};

} // namespace

bool is_point_to_point(Kind kind) {
  return kind == Kind::kSend || kind == Kind::kReceive;
}

bool has_root(Kind kind) {
  return kind == Kind::kBroadcast || kind == Kind::kReduce || kind == Kind::kGather || kind == Kind::kScatter;
}

bool reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

std::string describe(const Call& call) {
  std::string text = kNames[static_cast<int>(call.kind)];
  if (call.kind == Kind::kSplit) {
    return text;
  }
  text += "(";
  if (reduces(call.kind)) {
    text += std::string(kOps[call.op]) + " of ";
  }
  text += std::to_string(call.count) + " " + dtype_name(call.dtype);
  if (has_root(call.kind)) {
    text += ", root " + std::to_string(call.peer);
  }
  if (is_point_to_point(call.kind)) {
    text += (call.kind == Kind::kSend ? " to rank " : " from rank ") + std::to_string(call.peer);
  }
  return text + ")";
}

std::string difference(const Call& a, const Call& b) {
  if (is_point_to_point(a.kind) && is_point_to_point(b.kind)) {
    return a.count * element_size(a.dtype) != b.count * element_size(b.dtype) ? "sizes"
        : a.dtype != b.dtype                                                   ? "dtypes"
                                                                               : "";
  }
  if (a.kind != b.kind) {
    return "kinds";
  }
  if (a.dtype != b.dtype) {
    return "dtypes";
  }
  if (a.count != b.count) {
    return "counts";
  }
  if (reduces(a.kind) && a.op != b.op) {
    return "operations";
  }
  return has_root(a.kind) && a.peer != b.peer ? "roots" : "";
}

uint64_t elements_read(const Call& call, int rank, int ranks) {
  switch (call.kind) {
    case Kind::kBroadcast:
      return rank == call.peer ? call.count : 0;
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
      return call.count * static_cast<uint64_t>(ranks);
    case Kind::kScatter:
      return rank == call.peer ? call.count * static_cast<uint64_t>(ranks) : 0;
    case Kind::kReceive:
      return 0;
    default:
      return call.count;
  }
}

uint64_t elements_written(const Call& call, int rank, int ranks) {
  switch (call.kind) {
    case Kind::kReduce:
      return rank == call.peer ? call.count : 0;
    case Kind::kAllGather:
    case Kind::kAllToAll:
    case Kind::kSplit:
      return call.count * static_cast<uint64_t>(ranks);
    case Kind::kGather:
      return rank == call.peer ? call.count * static_cast<uint64_t>(ranks) : 0;
    case Kind::kSend:
      return 0;
    default:
      return call.count;
  }
}

size_t element_size(int32_t dtype) {
  return kDtypes[dtype].size;
}

const char* dtype_name(int32_t dtype) {
  return kDtypes[dtype].name;
}

bool depends(const Call& call, int reader, int writer) {
  if (call.count == 0) {
    return false;
  }
  switch (call.kind) {
    case Kind::kBroadcast:
    case Kind::kScatter:
      return writer == call.peer;
    case Kind::kReduce:
    case Kind::kGather:
      return reader == call.peer;
    case Kind::kSend:
      return false;
    case Kind::kReceive:
      return writer == call.peer;
    default:
      return true;
  }
}

} // namespace nccl
