// A rank of a communicator: what a ncclComm_t stands for. It keeps the calls that are not done, and hears from the
// meeting. Launches are made in group.cpp.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "declarations.h"
#include "later.h"
#include "meeting.h"

namespace nccl {

// An operation that a program has made: a sum of multiples.
struct Multiple {
  bool exists = false;
  int32_t dtype = 0;
  double factor = 1;
  const void* address = nullptr; // in memory that the device can read, when the collective runs; or null
};

class Rank final : public Answers {
 public:
  Rank(std::string key, int rank, int ranks, int device);

  // Asks the meeting to let it in. With the lock.
  void join(const std::shared_ptr<Rank>& self);
  // Waits for all ranks to join. Without the lock. Returns what is wrong.
  std::string wait_to_join();
  // With the lock: the meeting's desk hears of one call.
  uint64_t post(const Call& call, std::shared_ptr<Launch> launch, char* to, std::shared_ptr<Before> before);
  void give(uint64_t number, double factor, const char* data, size_t bytes, char* to);
  // With the lock. Its calls that are not done are left as they are, and what waits for them goes on.
  void leave(const std::string& how);
  // Without the lock: waits for its launches.
  std::string flush();

  void joined() override;
  void matched(uint64_t number, const Matched& collective, const Befores& befores) override;
  void done(uint64_t number, std::string data, std::function<void()> told) override;
  void failed(int code, const std::string& text) override;
  bool is_remote() const override {
    return false;
  }

  const std::string key;
  const int rank;
  const int ranks;
  const int device;

  // With the lock.
  std::shared_ptr<Desk> desk;
  bool is_joined = false;
  bool has_left = false;
  int error = 0; // ncclResult_t
  std::string text; // of the error
  std::vector<Multiple> multiples;
  uint64_t children = 0; // communicators made of this one
  uint64_t user = 0; // the thread that is in a call with it, or in a group
  int uses = 0;

 private:
  struct Piece {
    std::shared_ptr<Launch> launch;
    char* to = nullptr;
  };
  std::map<uint64_t, Piece> open_;
  uint64_t next_ = 0;
};

// The desk of a meeting by its key, which says where it is: in this process or in another one, which is called. With
// the lock. Returns null and a text if nobody answers.
std::shared_ptr<Desk> find_desk(const std::string& key, int ranks, std::string& error);
// A new key of a meeting in this process, which other processes can reach. With the lock.
std::string new_key();
// A key for a communicator that is made of another one; its meeting is in the same process.
std::string child_key(const std::string& key, const std::string& name);

// The rank of a handle; null if there is none, with the lock.
std::shared_ptr<Rank> rank_of(ncclComm_t comm);
ncclComm_t new_handle(const std::shared_ptr<Rank>& rank);
void drop_handle(ncclComm_t comm);

} // namespace nccl
