// The process that has meetings: it answers ranks of other processes, which reach it by a socket. A meeting's key begins
// with the name of that socket. The other side is in far.cpp.
//
// The process that made a communicator's id has to live as long as ranks of others want to talk to each other: when
// its program ends, it waits for them, for a while. If it is killed, the other ranks get an error.
#include "hub.h"

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <set>
#include <thread>

#include "messages.h"
#include "rank.h"

namespace nccl {
namespace {

constexpr double kLinger = 10; // seconds

// A rank of another process.
class Elsewhere final : public Answers {
 public:
  Elsewhere(std::shared_ptr<Connection> connection, std::string key, int rank)
      : connection_(std::move(connection)), key_(std::move(key)), rank_(rank) {}
  void joined() override {
    connection_->send(message(Message::kJoined, key_, rank_));
  }
  void matched(uint64_t number, const Matched& collective, const Befores&) override {
    auto answer = message(Message::kMatched, key_, rank_, number);
    answer.body = packed(collective);
    connection_->send(std::move(answer));
  }
  void done(uint64_t number, std::string data, std::function<void()> told) override {
    auto answer = message(Message::kDone, key_, rank_, number);
    answer.body = std::move(data);
    connection_->send(std::move(answer), [told = std::move(told)] {
      Lock lock(library_lock());
      told();
      settle(lock);
    });
  }
  void failed(int code, const std::string& text) override {
    auto answer = message(Message::kFailed, key_, rank_);
    answer.head.value = code;
    answer.body = text;
    connection_->send(std::move(answer));
  }
  bool is_remote() const override {
    return true;
  }

 private:
  std::shared_ptr<Connection> connection_;
  std::string key_;
  int rank_;
};

struct Guest {
  std::shared_ptr<Connection> connection;
  std::set<std::pair<std::string, int>> ranks;
};
std::set<std::shared_ptr<Guest>>& guests() {
  static auto* all = new std::set<std::shared_ptr<Guest>>;
  return *all;
}

std::shared_ptr<Meeting> meeting_there(const std::string& key) {
  for (const auto& each : meetings()) {
    if (each->key() == key) {
      return each;
    }
  }
  return nullptr;
}

void hear(const std::shared_ptr<Guest>& guest, Message&& heard) {
  Lock lock(library_lock());
  const auto& head = heard.head;
  if (head.kind == Message::kJoin) {
    guest->ranks.insert({heard.key, head.rank});
    meeting_of(heard.key, head.value)
        ->join(head.rank, head.value, plain_of<Identity>(heard.body),
               std::make_shared<Elsewhere>(guest->connection, heard.key, head.rank));
  } else if (const auto meeting = meeting_there(heard.key)) {
    if (head.kind == Message::kPost) {
      meeting->post(head.rank, head.number, plain_of<Call>(heard.body), nullptr);
    } else if (head.kind == Message::kGive) {
      meeting->give_owned(head.rank, head.number, head.factor, std::move(heard.body));
    } else if (head.kind == Message::kCancel) {
      meeting->cancel(head.rank, head.number, heard.body);
    } else if (head.kind == Message::kLeave) {
      guest->ranks.erase({heard.key, head.rank});
      meeting->leave(head.rank, heard.body);
    } else if (head.kind == Message::kFail) {
      meeting->fail(head.value, heard.body);
    }
  }
  settle(lock);
}

void lose(const std::shared_ptr<Guest>& guest) {
  Lock lock(library_lock());
  for (const auto& each : std::exchange(guest->ranks, {})) {
    if (const auto meeting = meeting_there(each.first)) {
      meeting->leave(each.second, "has ended");
    }
  }
  guests().erase(guest);
  settle(lock);
}

void serve(int file) {
  while (true) {
    const int accepted = ::accept4(file, nullptr, nullptr, SOCK_CLOEXEC);
    if (accepted < 0) {
      if (errno == EINTR || errno == ECONNABORTED) {
        continue;
      }
      return;
    }
    const auto guest = std::make_shared<Guest>();
    guest->connection = std::make_shared<Connection>(accepted);
    {
      const Lock lock(library_lock());
      guests().insert(guest);
    }
    guest->connection->start([guest](Message&& heard) { hear(guest, std::move(heard)); }, [guest] { lose(guest); });
  }
}

// Says who is missing when no rank of this process waits itself.
void look_at_the_clock() {
  while (true) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    Lock lock(library_lock());
    expire();
  }
}

bool is_wanted() {
  for (const auto& meeting : meetings()) {
    if (meeting->remote_ranks() > 1) {
      return true;
    }
  }
  for (const auto& guest : guests()) {
    if (!guest->connection->is_idle()) {
      return true;
    }
  }
  return false;
}

// At the end of the program.
struct Goodbye {
  bool is_server = false;
  ~Goodbye() {
    if (!is_server) {
      return;
    }
    Lock lock(library_lock());
    for (const auto& meeting : meetings()) {
      meeting->leave_all_here();
    }
    const double until = now() + kLinger;
    while (is_wanted() && now() < until) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      lock.lock();
    }
  }
};
Goodbye goodbye;

void start_to_serve() {
  static uint64_t serves = 0; // a forked child has no threads, and another number
  if (serves == process_number()) {
    return;
  }
  const int file = listen_at(name_here());
  if (file >= 0) {
    std::thread(serve, file).detach();
    std::thread(look_at_the_clock).detach();
    goodbye.is_server = true;
    serves = process_number();
  }
}

} // namespace

std::string name_here() {
  return "nogpu-nccl-" + std::to_string(getpid()) + "-" + std::to_string(process_number());
}

std::string name_in(const std::string& key) {
  return key.substr(0, key.find(' '));
}

std::string new_key() {
  static uint64_t made = 0;
  start_to_serve();
  return name_here() + " " + std::to_string(++made);
}

std::string child_key(const std::string& key, const std::string& name) {
  return key + " " + name;
}

} // namespace nccl
