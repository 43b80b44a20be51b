// What one rank asks of a communicator: the kind of call, its arguments and what follows from them. No memory, no
// streams. The other files of this folder use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace nccl {

enum class Kind : int32_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kReceive,
  kSplit, // of this library: every rank gets the colours and keys of all
};

// Plain data: it is sent between processes as it is.
struct Call {
  Kind kind = Kind::kAllReduce;
  int32_t dtype = 0; // ncclDataType_t
  int32_t op = 0; // ncclRedOp_t; ncclNumOps for all that a program has made
  int32_t peer = -1; // the root, or the other rank of Send and Recv
  uint64_t count = 0;
  uint64_t issued = 0; // the number of the launch on its device; calls of one group and communicator share it
  uint64_t group = 0; // the number of the group in its process
  uint64_t thread = 0; // that launched it, unlike those of other processes
};

bool is_point_to_point(Kind kind);
bool has_root(Kind kind);
bool reduces(Kind kind);
// In words: "ncclAllReduce(sum of 4 float32)".
std::string describe(const Call& call);
// What differs between the calls of two ranks that should be one collective, or nothing: "counts".
std::string difference(const Call& a, const Call& b);

// Elements that a rank reads and writes.
uint64_t elements_read(const Call& call, int rank, int ranks);
uint64_t elements_written(const Call& call, int rank, int ranks);
size_t element_size(int32_t dtype);
const char* dtype_name(int32_t dtype);

// Whether what `reader` gets depends on what `writer` gives. NCCL promises no more order than that: the kernel of
// `reader` does not end before that of `writer` has begun. A root of a broadcast may be done before others begin.
bool depends(const Call& call, int reader, int writer);

} // namespace nccl
