// Communicators that are made of others, by a split or without some ranks.
#include <algorithm>
#include <set>

#include "communicators.h"

namespace nccl {
namespace {

// What a rank says for a split. Plain data.
struct Choice {
  int32_t colour;
  int32_t key;
};

// A collective of host memory, without a stream.
struct Split {
  std::shared_ptr<Rank> parent;
  Choice mine;
  std::vector<Choice> all;
  std::shared_ptr<Launch> launch = std::make_shared<Launch>();

  void begin() {
    const Lock lock(library_lock());
    all.resize(static_cast<size_t>(parent->ranks));
    launch->calls = 1;
    launch->deadline = now() + patience();
    Call call;
    call.kind = Kind::kSplit;
    call.dtype = ncclInt32;
    call.count = sizeof(Choice) / sizeof(int32_t);
    auto* to = reinterpret_cast<char*>(all.data());
    const auto number = parent->post(call, launch, to, nullptr);
    parent->give(number, 1, reinterpret_cast<const char*>(&mine), sizeof(mine), to);
  }

  // The ranks of this rank's colour, in the order of their keys; then of their ranks.
  std::vector<int> chosen() const {
    std::vector<int> result;
    for (int rank = 0; rank < parent->ranks; ++rank) {
      if (all[static_cast<size_t>(rank)].colour == mine.colour) {
        result.push_back(rank);
      }
    }
    std::stable_sort(result.begin(), result.end(), [&](int a, int b) {
      return all[static_cast<size_t>(a)].key < all[static_cast<size_t>(b)].key;
    });
    return result;
  }
};

ncclResult_t split(ncclComm_t comm, int colour, int key, ncclComm_t* made) {
  ncclResult_t result;
  const auto parent = valid("ncclCommSplit", comm, result);
  if (result != ncclSuccess) {
    return in_group(result);
  }
  if (parent->error) {
    return in_group(failure(static_cast<ncclResult_t>(parent->error), "ncclCommSplit: " + parent->text));
  }
  const auto splitting = std::make_shared<Split>();
  splitting->parent = parent;
  splitting->mine = {colour, key};
  *made = nullptr;
  return make({[splitting] {
                 splitting->begin();
                 Lock lock(library_lock());
                 settle(lock);
                 return ncclSuccess;
               },
               [splitting, made] {
                 const auto& old = *splitting->parent;
                 const auto text = wait_for({splitting->launch});
                 if (!text.empty()) {
                   return failure(ncclRemoteError, "ncclCommSplit: " + text);
                 }
                 if (splitting->mine.colour == NCCL_SPLIT_NOCOLOR) {
                   return ncclSuccess;
                 }
                 const auto ranks = splitting->chosen();
                 const auto mine = std::find(ranks.begin(), ranks.end(), old.rank) - ranks.begin();
                 Lock lock(library_lock());
                 const auto child = std::make_shared<Rank>(
                     child_key(old.key, "split " + std::to_string(++splitting->parent->children) + " colour " +
                                            std::to_string(splitting->mine.colour)),
                     static_cast<int>(mine), static_cast<int>(ranks.size()), old.device);
                 *made = new_handle(child);
                 // Other ranks may be this thread's, and come after this one. So nobody waits here for the others.
                 child->join(child);
                 return child->error ? failure(static_cast<ncclResult_t>(child->error), child->text) : ncclSuccess;
               }});
}

ncclResult_t shrink(ncclComm_t comm, const int* excluded, int count, ncclComm_t* made, bool aborts) {
  ncclResult_t result;
  const auto parent = valid("ncclCommShrink", comm, result);
  if (result != ncclSuccess) {
    return in_group(result);
  }
  const std::set<int> out(excluded, excluded + count);
  if (out.count(parent->rank)) {
    return in_group(failure(ncclInvalidArgument, "ncclCommShrink: rank " + std::to_string(parent->rank) +
                                                     " is excluded, so it may not call this"));
  }
  std::string key;
  int mine = 0, ranks = 0;
  for (int rank = 0; rank < parent->ranks; ++rank) {
    mine += rank < parent->rank && !out.count(rank);
    ranks += !out.count(rank);
  }
  if (aborts) {
    Lock lock(library_lock());
    parent->leave("has shrunk its communicator");
    settle(lock);
  }
  {
    const Lock lock(library_lock());
    key = child_key(parent->key, "shrunk " + std::to_string(++parent->children));
  }
  return make_rank("ncclCommShrink", made, key, ranks, mine, parent->device);
}

} // namespace
} // namespace nccl

extern "C" {

ncclResult_t ncclCommSplit(ncclComm_t comm, int colour, int key, ncclComm_t* made, ncclConfig_t*) {
  standin::count_call("ncclCommSplit");
  return nccl::split(comm, colour, key, made);
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* made, ncclConfig_t*, int flags) {
  standin::count_call("ncclCommShrink");
  return nccl::shrink(comm, excluded, count, made, flags & NCCL_SHRINK_ABORT);
}

} // extern "C"
