// NCCL's functions that launch collectives, and those for groups.
#include "group.h"

namespace nccl {
namespace {

struct Buffers {
  const void* send;
  void* receive;
};

std::string why_not_buffer(const Rank& rank, const void* address, uint64_t elements, int32_t dtype, const char* name) {
  const size_t bytes = elements * element_size(dtype);
  if (bytes == 0) {
    return "";
  }
  const std::string which = std::string("the ") + name + " of rank " + std::to_string(rank.rank);
  const auto* memory = standin::memory_of(address);
  if (memory == nullptr) {
    return which + " is no memory of CUDA (it may be memory of the host that is not pinned, or freed)";
  }
  if (memory->device >= 0 && memory->device != rank.device) {
    return which + " is memory of cuda:" + std::to_string(memory->device) + ", and the rank's device is cuda:" +
        std::to_string(rank.device);
  }
  const auto begin = static_cast<size_t>(static_cast<const char*>(address) - memory->begin);
  if (begin + bytes > memory->bytes) {
    return which + " takes " + std::to_string(bytes) + " bytes, and its allocation ends after " +
        std::to_string(memory->bytes - begin);
  }
  return "";
}

std::string why_not(const Rank& rank, const Call& call) {
  if (call.dtype < 0 || call.dtype >= ncclNumTypes) {
    return "there is no dtype of number " + std::to_string(call.dtype);
  }
  if (has_root(call.kind) && (call.peer < 0 || call.peer >= rank.ranks)) {
    return "the root has to be a rank, 0 to " + std::to_string(rank.ranks - 1) + "; got " + std::to_string(call.peer);
  }
  if (is_point_to_point(call.kind) && (call.peer < 0 || call.peer >= rank.ranks)) {
    return "the peer has to be a rank, 0 to " + std::to_string(rank.ranks - 1) + "; got " + std::to_string(call.peer);
  }
  return "";
}

// Buffers may be the same where NCCL works in place, and may not overlap otherwise.
std::string why_not_overlap(const Rank& rank, const Call& call, Buffers buffers) {
  const auto size = element_size(call.dtype);
  const auto* send = static_cast<const char*>(buffers.send);
  const auto* receive = static_cast<const char*>(buffers.receive);
  const auto read = elements_read(call, rank.rank, rank.ranks) * size;
  const auto written = elements_written(call, rank.rank, rank.ranks) * size;
  if (read == 0 || written == 0 || send + read <= receive || receive + written <= send) {
    return "";
  }
  const auto block = static_cast<uint64_t>(rank.rank) * call.count * size;
  bool in_place = send == receive;
  if (call.kind == Kind::kAllGather || call.kind == Kind::kGather) {
    in_place = send == receive + block;
  } else if (call.kind == Kind::kReduceScatter || call.kind == Kind::kScatter) {
    in_place = receive == send + block;
  } else if (call.kind == Kind::kAllToAll) {
    in_place = false;
  }
  return in_place ? "" : "sendbuff and recvbuff overlap, and not as NCCL's in-place calls want it";
}

// The stream, which has to be one of the rank's device.
std::string find_stream(const Rank& rank, cudaStream_t stream, standin::StreamName& name) {
  const OnDevice on(rank.device);
  try {
    name = standin::name_of(stream);
  } catch (const std::exception& error) {
    return std::string("the stream does not exist: ") + error.what();
  }
  if (name.device != rank.device) {
    return "the stream belongs to cuda:" + std::to_string(name.device) + ", and the rank's device is cuda:" +
        std::to_string(rank.device);
  }
  return "";
}

ncclResult_t enqueue(const char* function, ncclComm_t comm, Call call, Buffers buffers, cudaStream_t stream) {
  standin::count_call(function);
  const auto refuse = [&](ncclResult_t result, const std::string& text) {
    return failure(result, std::string(function) + ": " + text);
  };
  Issued issued;
  {
    const Lock lock(library_lock());
    issued.rank = rank_of(comm);
    if (issued.rank && issued.rank->error) {
      return refuse(static_cast<ncclResult_t>(issued.rank->error), issued.rank->text);
    }
  }
  if (!issued.rank) {
    return refuse(ncclInvalidArgument, "the communicator does not exist, or was destroyed");
  }
  auto& rank = *issued.rank;
  auto error = why_not(rank, call);
  if (!error.empty()) {
    return refuse(ncclInvalidArgument, error);
  }
  if (reduces(call.kind) && call.op >= ncclNumOps) {
    const Lock lock(library_lock());
    const auto place = static_cast<size_t>(call.op - ncclNumOps);
    if (place >= rank.multiples.size() || !rank.multiples[place].exists ||
        rank.multiples[place].dtype != call.dtype) {
      return refuse(ncclInvalidArgument, "the operation was made for another communicator or dtype, or was destroyed");
    }
    issued.multiple = rank.multiples[place];
    call.op = ncclNumOps;
  } else if (reduces(call.kind) && call.op < 0) {
    return refuse(ncclInvalidArgument, "there is no operation of number " + std::to_string(call.op));
  }
  error = why_not_buffer(rank, buffers.send, elements_read(call, rank.rank, rank.ranks), call.dtype, "sendbuff");
  if (error.empty()) {
    error = why_not_buffer(rank, buffers.receive, elements_written(call, rank.rank, rank.ranks), call.dtype, "recvbuff");
  }
  error = error.empty() ? why_not_overlap(rank, call, buffers) : error;
  error = error.empty() ? find_stream(rank, stream, issued.stream) : error;
  if (!error.empty()) {
    return refuse(ncclInvalidArgument, error);
  }
  const auto result = use(issued.rank, function);
  if (result != ncclSuccess) {
    return result;
  }
  issued.call = call;
  issued.send = static_cast<const char*>(buffers.send);
  issued.receive = static_cast<char*>(buffers.receive);
  return issue(std::move(issued));
}

// A call outside of a group is a group of its own.
ncclResult_t collective(const char* function, ncclComm_t comm, Kind kind, int dtype, int op, int peer, size_t count,
                        Buffers buffers, cudaStream_t stream) {
  Call call;
  call.kind = kind;
  call.dtype = dtype;
  call.op = op;
  call.peer = peer;
  call.count = count;
  start_group();
  in_group(enqueue(function, comm, call, buffers, stream));
  return end_group();
}

} // namespace
} // namespace nccl

using nccl::collective;
using nccl::Kind;

extern "C" {

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclAllReduce", comm, Kind::kAllReduce, dtype, op, -1, count, {send, receive}, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t dtype, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclBroadcast", comm, Kind::kBroadcast, dtype, 0, root, count, {send, receive}, stream);
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return collective("ncclBcast", comm, Kind::kBroadcast, dtype, 0, root, count, {buffer, buffer}, stream);
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclReduce", comm, Kind::kReduce, dtype, op, root, count, {send, receive}, stream);
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                           cudaStream_t stream) {
  return collective("ncclAllGather", comm, Kind::kAllGather, dtype, 0, -1, count, {send, receive}, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclReduceScatter", comm, Kind::kReduceScatter, dtype, op, -1, count, {send, receive}, stream);
}

ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                          cudaStream_t stream) {
  return collective("ncclAlltoAll", comm, Kind::kAllToAll, dtype, 0, -1, count, {send, receive}, stream);
}

ncclResult_t ncclGather(const void* send, void* receive, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  return collective("ncclGather", comm, Kind::kGather, dtype, 0, root, count, {send, receive}, stream);
}

ncclResult_t ncclScatter(const void* send, void* receive, size_t count, ncclDataType_t dtype, int root,
                         ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclScatter", comm, Kind::kScatter, dtype, 0, root, count, {send, receive}, stream);
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return collective("ncclSend", comm, Kind::kSend, dtype, 0, peer, count, {send, nullptr}, stream);
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return collective("ncclRecv", comm, Kind::kReceive, dtype, 0, peer, count, {nullptr, receive}, stream);
}

ncclResult_t ncclGroupStart() {
  standin::count_call("ncclGroupStart");
  return nccl::start_group();
}

ncclResult_t ncclGroupEnd() {
  standin::count_call("ncclGroupEnd");
  return nccl::end_group();
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) {
  return nccl::failure(ncclInvalidUsage, "ncclGroupSimulateEnd: the stand-in for NCCL knows no times");
}

} // extern "C"
