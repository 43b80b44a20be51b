// The values of a collective, computed from the data of all ranks. See `compute` in meeting.h.
#include <algorithm>
#include <cstring>

#include "declarations.h"
#include "meeting.h"
#include "numbers.h"

namespace nccl {
namespace {

char* target(Arrival& arrival, size_t bytes) {
  if (arrival.to == nullptr) {
    arrival.result.resize(bytes);
    return arrival.result.data();
  }
  return arrival.to;
}

// Memory of the two may be the same: NCCL works in place.
void copy(char* to, const char* from, size_t bytes) {
  if (bytes && to != from) {
    std::memmove(to, from, bytes);
  }
}

void compute_sums(Collective& collective) {
  const auto& call = collective.first()->call;
  auto& arrivals = collective.arrivals;
  std::vector<const char*> terms;
  std::vector<double> factors;
  for (const auto& arrival : arrivals) {
    terms.push_back(arrival.data);
    factors.push_back(arrival.factor);
  }
  if (call.op < ncclNumOps) {
    factors.clear();
  }
  const size_t bytes = call.count * element_size(call.dtype);
  if (call.kind == Kind::kReduceScatter) {
    for (size_t rank = 0; rank < arrivals.size(); ++rank) {
      reduce(call.dtype, call.op, terms, factors, rank * call.count, call.count, target(arrivals[rank], bytes));
    }
    return;
  }
  // The first target may be a term of its own. Every element is written after it is read, so it may hold the sum.
  auto& first = call.kind == Kind::kReduce ? arrivals[static_cast<size_t>(call.peer)] : arrivals.front();
  char* sum = target(first, bytes);
  reduce(call.dtype, call.op, terms, factors, 0, call.count, sum);
  for (auto& arrival : arrivals) {
    if (call.kind == Kind::kAllReduce && &arrival != &first) {
      copy(target(arrival, bytes), sum, bytes);
    }
  }
}

} // namespace

void compute(Collective& collective) {
  const auto& call = collective.first()->call;
  auto& arrivals = collective.arrivals;
  const size_t bytes = call.count * element_size(call.dtype);
  const size_t ranks = arrivals.size();
  const auto root = static_cast<size_t>(std::max(call.peer, 0));
  if (reduces(call.kind)) {
    return compute_sums(collective);
  }
  for (size_t reader = 0; reader < ranks; ++reader) {
    auto& arrival = arrivals[reader];
    switch (call.kind) {
      case Kind::kBroadcast:
        copy(target(arrival, bytes), arrivals[root].data, bytes);
        break;
      case Kind::kScatter:
        copy(target(arrival, bytes), arrivals[root].data + reader * bytes, bytes);
        break;
      case Kind::kGather:
        if (reader != root) {
          break;
        }
        [[fallthrough]];
      case Kind::kAllGather:
      case Kind::kSplit: {
        char* to = target(arrival, bytes * ranks);
        for (size_t writer = 0; writer < ranks; ++writer) {
          copy(to + writer * bytes, arrivals[writer].data, bytes);
        }
        break;
      }
      case Kind::kAllToAll: {
        char* to = target(arrival, bytes * ranks);
        for (size_t writer = 0; writer < ranks; ++writer) {
          copy(to + writer * bytes, arrivals[writer].data + reader * bytes, bytes);
        }
        break;
      }
      default: // a pair
        if (reader == 1) {
          copy(target(arrival, bytes), arrivals[0].data, bytes);
        }
    }
  }
}

} // namespace nccl
