// Graphs: work that streams were given while they captured. It is kept, and given to a stream again at every launch.
//
// A capture has a lane for each of its streams. The first is that on which it began; others join by waiting for an event
// that was recorded in it. At a launch, the first lane is the stream of the launch, and each other one is a stream of the
// graph's own, so that the watcher sees what the lanes do to each other.
#pragma once

#include "state.h"

namespace standin {

// An object of the program that lives as long as graphs refer to it.
class UserObject {
 public:
  UserObject(void* object, cudaHostFn_t destroy, unsigned references)
      : object_(object), destroy_(destroy), references_(references) {}
  void retain(unsigned count) {
    references_ += count;
  }
  // With the last reference, the object is destroyed.
  void release(unsigned count) {
    if (references_.fetch_sub(count) == count) {
      destroy_(object_);
      delete this;
    }
  }

 private:
  void* const object_;
  const cudaHostFn_t destroy_;
  std::atomic<unsigned> references_;
};

struct Piece {
  enum class Kind { kWork, kRecord, kWait };
  Kind kind = Kind::kWork;
  size_t lane = 0;
  std::function<std::string(StreamName)> told; // the watcher's: see Watcher::keep
  std::function<void()> work; // null if there is none
  size_t event = 0; // which is recorded, or waited for
};

struct Graph {
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    for (const auto& [object, references] : retained) {
      object->release(references);
    }
  }
  std::vector<int> lanes; // the device of each
  std::vector<Piece> pieces;
  size_t events = 0;
  std::vector<std::pair<UserObject*, unsigned>> retained;
};

} // namespace standin
