// Meetings with ranks of several processes: the side that has the meeting, and that of ranks elsewhere. A meeting's key
// begins with the name of the socket of its process. See `find_desk` and `new_key` in rank.h.
//
// The process that made a communicator's id has to live as long as ranks of others want to talk to each other: when
// its program ends, it waits for them, for a while. If it is killed, the other ranks get an error.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <set>

#include "rank.h"
#include "wire.h"

namespace nccl {
namespace {

constexpr double kLinger = 10; // seconds

template <typename T>
std::string bytes_of(const T& plain) {
  return {reinterpret_cast<const char*>(&plain), sizeof(plain)};
}

template <typename T>
T plain_of(const std::string& bytes) {
  T plain;
  std::memcpy(static_cast<void*>(&plain), bytes.data(), std::min(sizeof(plain), bytes.size()));
  return plain;
}

Message message(Message::Kind kind, const std::string& key, int rank, uint64_t number = 0) {
  Message result;
  result.head.kind = kind;
  result.head.rank = rank;
  result.head.number = number;
  result.key = key;
  return result;
}

std::string packed(const Matched& collective) {
  std::string body = bytes_of(collective.number) + bytes_of(static_cast<uint64_t>(collective.launches.size()));
  for (const auto& each : collective.launches) {
    body += bytes_of(each.first) + bytes_of(each.second);
  }
  return body + collective.text;
}

Matched unpacked(const std::string& key, const std::string& body) {
  const auto word = [&](size_t i) { return plain_of<uint64_t>(body.substr(i * sizeof(uint64_t), sizeof(uint64_t))); };
  Matched result;
  result.meeting = key;
  result.number = word(0);
  for (size_t i = 0; i < word(1); ++i) {
    result.launches.emplace_back(word(2 + 2 * i), word(3 + 2 * i));
  }
  result.text = body.substr((2 + 2 * result.launches.size()) * sizeof(uint64_t));
  return result;
}

// ---- the side of the meeting

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

std::string name_here() {
  return "dataparallel-nccl-" + std::to_string(getpid()) + "-" + std::to_string(process_number());
}

std::string name_in(const std::string& key) {
  return key.substr(0, key.find(' '));
}

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

// ---- the side of ranks elsewhere

// The connection to the process of a meeting.
struct Host {
  std::shared_ptr<Connection> connection;
  std::map<std::pair<std::string, int>, std::shared_ptr<Answers>> ranks;
  bool has_ended = false;
};

void answer(const std::shared_ptr<Host>& host, Message&& heard) {
  Lock lock(library_lock());
  const auto found = host->ranks.find({heard.key, heard.head.rank});
  if (found != host->ranks.end()) {
    const auto rank = found->second;
    switch (heard.head.kind) {
      case Message::kJoined:
        rank->joined();
        break;
      case Message::kMatched: {
        const auto collective = unpacked(heard.key, heard.body);
        const auto circle = launched(collective);
        rank->matched(heard.head.number, collective, {});
        if (!circle.text.empty()) {
          fail_circle(circle);
        }
        break;
      }
      case Message::kDone:
        rank->done(heard.head.number, std::move(heard.body), [] {});
        break;
      default:
        rank->failed(heard.head.value, heard.body);
    }
  }
  settle(lock);
}

void lose(const std::shared_ptr<Host>& host) {
  const Lock lock(library_lock());
  host->has_ended = true;
  for (const auto& each : host->ranks) {
    each.second->failed(ncclRemoteError, "the process that made the communicator's id has ended");
  }
}

class FarDesk final : public Desk {
 public:
  FarDesk(std::shared_ptr<Host> host, std::string key) : host_(std::move(host)), key_(std::move(key)) {}
  void join(int rank, int ranks, const Identity& identity, std::shared_ptr<Answers> answers) override {
    host_->ranks[{key_, rank}] = std::move(answers);
    auto asked = message(Message::kJoin, key_, rank);
    asked.head.value = ranks;
    asked.body = bytes_of(identity);
    host_->connection->send(std::move(asked));
  }
  void post(int rank, uint64_t number, const Call& call, std::shared_ptr<Before>) override {
    auto asked = message(Message::kPost, key_, rank, number);
    asked.body = bytes_of(call);
    host_->connection->send(std::move(asked));
  }
  void give(int rank, uint64_t number, double factor, const char* data, size_t bytes, char*) override {
    auto asked = message(Message::kGive, key_, rank, number);
    asked.head.factor = factor;
    asked.body.assign(bytes ? data : "", bytes);
    host_->connection->send(std::move(asked));
  }
  void cancel(int rank, uint64_t number, const std::string& why) override {
    auto asked = message(Message::kCancel, key_, rank, number);
    asked.body = why;
    host_->connection->send(std::move(asked));
  }
  void leave(int rank, const std::string& how) override {
    auto asked = message(Message::kLeave, key_, rank);
    asked.body = how;
    host_->connection->send(std::move(asked));
    host_->ranks.erase({key_, rank});
    forget_orders(key_);
  }
  void fail(int code, const std::string& text) override {
    auto asked = message(Message::kFail, key_, -1);
    asked.head.value = code;
    asked.body = text;
    host_->connection->send(std::move(asked));
    for (const auto& each : host_->ranks) {
      if (each.first.first == key_) {
        each.second->failed(code, text);
      }
    }
  }

 private:
  std::shared_ptr<Host> host_;
  std::string key_;
};

std::shared_ptr<Host> host_at(const std::string& name) {
  static auto* hosts = new std::map<std::string, std::shared_ptr<Host>>;
  auto& host = (*hosts)[std::to_string(process_number()) + name];
  if (!host || host->has_ended) {
    const int file = connect_to(name);
    if (file < 0) {
      return nullptr;
    }
    host = std::make_shared<Host>();
    host->connection = std::make_shared<Connection>(file);
    const auto mine = host;
    host->connection->start([mine](Message&& heard) { answer(mine, std::move(heard)); }, [mine] { lose(mine); });
  }
  return host;
}

} // namespace

std::shared_ptr<Desk> find_desk(const std::string& key, int ranks, std::string& error) {
  if (name_in(key) == name_here()) {
    return meeting_of(key, ranks);
  }
  const auto host = host_at(name_in(key));
  if (!host) {
    error = "no process answers for the communicator's id " + key +
        ": ids are made by ncclGetUniqueId, in a process of this machine that is still running";
    return nullptr;
  }
  auto desk = std::make_shared<FarDesk>(host, key);
  add_desk(key, desk);
  return desk;
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
