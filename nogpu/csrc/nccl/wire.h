// Messages between the processes of a communicator, and the connections that carry them: local sockets with a thread
// that reads and one that writes. Knows no communicators.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace nccl {

struct Message {
  enum Kind : uint32_t { kHello, kJoin, kPost, kGive, kCancel, kLeave, kFail, kJoined, kMatched, kDone, kFailed };
  // Plain data.
  struct Head {
    uint32_t kind = 0;
    int32_t rank = -1;
    int32_t value = 0; // ranks of a communicator, or a ncclResult_t
    uint32_t key_size = 0;
    uint64_t number = 0; // of the rank's call
    double factor = 1;
    uint64_t body_size = 0;
  };
  Head head;
  std::string key; // of the meeting
  std::string body;
};

// A connection ends when the other process does. Its functions may be called by any thread.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  explicit Connection(int file);
  ~Connection();
  // `read` is called in the connection's own thread, and `ended` at last.
  void start(std::function<void(Message&&)> read, std::function<void()> ended);
  // Returns at once. `written` is called in another thread, also if the connection has ended.
  void send(Message message, std::function<void()> written = {});
  bool is_idle(); // nothing is left to be written
  void close();

 private:
  struct Outgoing {
    Message message;
    std::function<void()> written;
  };
  bool receive(Message& message);
  void write_all();

  const int file_;
  std::mutex lock_;
  std::condition_variable more_;
  std::deque<Outgoing> outgoing_;
  bool writes_ = false;
  bool closed_ = false;
};

// A socket that others can connect to by this name, which lies in no folder; -1 if there is none.
int listen_at(const std::string& name);
int connect_to(const std::string& name);

} // namespace nccl
