// Meetings of other processes, as ranks of this one see them: what they say is sent, and the answers are heard by a
// thread. One connection carries all that two processes have to say. The other side is in hub.cpp.
#include <set>

#include "hub.h"
#include "messages.h"
#include "rank.h"

namespace nccl {
namespace {

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

} // namespace nccl
