// Where the ranks of a communicator meet: it matches their calls, refuses those that do not fit each other, computes
// the values when the last rank has come and given its data, and says who is missing when it takes too long. It lies in
// the process that made the communicator's id. It knows no streams, and no sockets: ranks of other processes are
// `Answers` that send messages.
//
// All functions are called with the library's lock, but for `settle`, which gives it back while it computes.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "orders.h"
#include "process.h"

namespace nccl {

struct Before; // what the streams of a rank had been given before its call, see later.h
using Befores = std::vector<std::shared_ptr<Before>>;

// A rank, to those that it meets. Plain data.
struct Identity {
  uint64_t process = 0;
  uint64_t device = 0; // its `device_number`
  int32_t pid = 0;
  int32_t index = 0; // of the device in its process
  char host[64] = {};
  char bus[32] = {}; // the device's PCI address
};

// What a rank is told.
class Answers {
 public:
  virtual ~Answers() = default;
  virtual void joined() = 0;
  // All ranks have launched the call with this number. `befores` are those of other ranks in this process on which the
  // rank's values depend.
  virtual void matched(uint64_t number, const Matched& collective, const Befores& befores) = 0;
  // The values are there, in the rank's buffer or in `data`. `told` is called with the lock when the rank has them.
  virtual void done(uint64_t number, std::string data, std::function<void()> told) = 0;
  // The communicator is of no use any more. `code` is a ncclResult_t.
  virtual void failed(int code, const std::string& text) = 0;
  virtual bool is_remote() const = 0;
};

// A meeting as a rank sees it, in this process or another one. Numbers count the calls of a rank, from 0.
class Desk {
 public:
  virtual ~Desk() = default;
  virtual void join(int rank, int ranks, const Identity& identity, std::shared_ptr<Answers> answers) = 0;
  // The rank has launched a call.
  virtual void post(int rank, uint64_t number, const Call& call, std::shared_ptr<Before> before) = 0;
  // The earlier work on its stream is done, so its data can be read until the call is done.
  virtual void give(int rank, uint64_t number, double factor, const char* data, size_t bytes, char* to) = 0;
  // The rank has posted the call and does not launch it: something else is wrong with it. If all its ranks say so, the
  // communicator stays of use.
  virtual void cancel(int rank, uint64_t number, const std::string& why) = 0;
  virtual void leave(int rank, const std::string& how) = 0;
  virtual void fail(int code, const std::string& text) = 0;
};

// What one rank has brought to a collective.
struct Arrival {
  bool has_come = false;
  bool has_given = false;
  uint64_t number = 0;
  Call call;
  double factor = 1;
  const char* data = nullptr;
  std::string owned; // the data, if they came by a message
  char* to = nullptr; // where the result goes; null: to `result`
  std::string result;
  std::shared_ptr<Before> before;
  std::string cancelled; // why
};

class Meeting;

// A collective, or a pair of Send and Recv. Of a pair the first arrival is the sender's.
struct Collective {
  uint64_t number = 0;
  std::shared_ptr<Meeting> meeting;
  std::vector<int> ranks; // of the arrivals
  std::vector<Arrival> arrivals;
  size_t come = 0;
  size_t given = 0;
  size_t untold = 0; // ranks of other processes that do not have their values yet
  double since = 0;
  const Arrival* first() const;
};

class Meeting final : public Desk, public std::enable_shared_from_this<Meeting> {
 public:
  Meeting(std::string key, int ranks);
  void join(int rank, int ranks, const Identity& identity, std::shared_ptr<Answers> answers) override;
  void post(int rank, uint64_t number, const Call& call, std::shared_ptr<Before> before) override;
  void give(int rank, uint64_t number, double factor, const char* data, size_t bytes, char* to) override;
  void cancel(int rank, uint64_t number, const std::string& why) override;
  void leave(int rank, const std::string& how) override;
  void fail(int code, const std::string& text) override;

  // As `give`, with data from a message.
  void give_owned(int rank, uint64_t number, double factor, std::string data);
  void expire(double time);
  void finish(const std::shared_ptr<Collective>& collective);
  bool is_over() const; // all ranks have left
  void leave_all_here(); // the process ends
  const std::string& key() const {
    return key_;
  }
  size_t remote_ranks() const; // that have not left
  std::string name(int rank) const;
  std::string title() const; // of the communicator
  int ranks() const {
    return static_cast<int>(members_.size());
  }

 private:
  struct Member {
    Identity identity;
    std::shared_ptr<Answers> answers;
    std::string left; // how, in words
    uint64_t next = 0; // the number of its next collective
    std::string last; // its last call, in words
    std::map<uint64_t, std::pair<std::shared_ptr<Collective>, size_t>> open; // by the number of the call
  };
  // Sends from one rank to another, and the Recvs for them.
  struct Line {
    std::deque<std::shared_ptr<Collective>> open;
    uint64_t first = 0; // the number of the first open one
    uint64_t next[2] = {0, 0}; // of the sender and of the receiver
  };

  std::string why_not(const Identity& identity, int rank, int ranks) const;
  std::string why_not(const Collective& collective, int rank, const Call& call) const;
  std::shared_ptr<Collective> find(int rank, const Call& call);
  std::shared_ptr<Collective> made(std::vector<int> ranks);
  void match(Collective& collective);
  std::string missing(const Collective& collective) const;
  std::string missing_to_join() const;
  void tell(const std::shared_ptr<Collective>& collective, bool remote);

  std::string key_;
  std::vector<Member> members_;
  size_t joined_ = 0;
  double since_ = 0;
  std::string failure_; // in words
  uint64_t made_ = 0;
  std::deque<std::shared_ptr<Collective>> open_; // the next collectives of the ranks
  uint64_t first_ = 0; // the number of the first of them
  std::map<std::pair<int, int>, Line> lines_;
};

// The meeting of this process with this key; made if it does not exist.
std::shared_ptr<Meeting> meeting_of(const std::string& key, int ranks);
std::vector<std::shared_ptr<Meeting>> meetings();
void drop_meeting(const std::string& key);

// Everybody has given data for the collective.
void make_ready(const std::shared_ptr<Collective>& collective);
// Computes what is ready, in any meeting of this process, until nothing is.
void settle(Lock& lock);
// Fails meetings whose ranks have waited for too long.
void expire();
// Fails all communicators of a circle, with its text.
void fail_circle(const Circle& circle);
// Desks of other processes' meetings, so that a circle can be told to them.
void add_desk(const std::string& key, std::weak_ptr<Desk> desk);

// Computes the values of a collective that everybody has given data for. Called without the lock.
void compute(Collective& collective);

} // namespace nccl
