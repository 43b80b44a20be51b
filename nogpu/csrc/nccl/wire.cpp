#include "wire.h"

#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

namespace nccl {
namespace {

// Open sockets, plus 1. A forked child closes its copies: the other side shall see that the parent has ended, whatever
// lives on.
std::array<std::atomic<int>, 1024> files{};

int kept(int file) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    for (auto& each : files) {
      if (const int open = each.exchange(0)) {
        ::close(open - 1);
      }
    }
  });
  (void)registered;
  for (auto& each : files) {
    int free = 0;
    if (each.compare_exchange_strong(free, file + 1)) {
      break;
    }
  }
  return file;
}

void close_kept(int file) {
  for (auto& each : files) {
    int mine = file + 1;
    if (each.compare_exchange_strong(mine, 0)) {
      ::close(file);
      return;
    }
  }
}

// Calls `move` with what is left until nothing is. Returns false if the other side is gone.
template <class Byte, class Move>
bool move_all(Byte* at, size_t bytes, Move move) {
  while (bytes) {
    const ssize_t done = move(at, bytes);
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      return false;
    }
    at += done;
    bytes -= static_cast<size_t>(done);
  }
  return true;
}

bool write_bytes(int file, const void* data, size_t bytes) {
  return move_all(static_cast<const char*>(data), bytes,
                  [file](const char* at, size_t left) { return ::send(file, at, left, MSG_NOSIGNAL); });
}

bool read_bytes(int file, void* data, size_t bytes) {
  return move_all(static_cast<char*>(data), bytes, [file](char* at, size_t left) { return ::recv(file, at, left, 0); });
}

// A name that begins with a zero byte is in no file system, and goes when its process does.
socklen_t address_of(const std::string& name, sockaddr_un& address) {
  std::memset(&address, 0, sizeof(address));
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof(address.sun_path) - 2);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

} // namespace

Connection::Connection(int file) : file_(kept(file)) {}

Connection::~Connection() {
  close_kept(file_);
}

void Connection::start(std::function<void(Message&&)> read, std::function<void()> ended) {
  const auto self = shared_from_this();
  std::thread([self, read = std::move(read), ended = std::move(ended)] {
    Message message;
    while (self->receive(message)) {
      read(std::move(message));
      message = {};
    }
    self->close();
    ended();
  }).detach();
  std::thread([self] { self->write_all(); }).detach();
}

void Connection::send(Message message, std::function<void()> written) {
  message.head.key_size = static_cast<uint32_t>(message.key.size());
  message.head.body_size = message.body.size();
  const std::lock_guard<std::mutex> guard(lock_);
  outgoing_.push_back({std::move(message), std::move(written)});
  more_.notify_one();
}

bool Connection::is_idle() {
  const std::lock_guard<std::mutex> guard(lock_);
  return closed_ || (outgoing_.empty() && !writes_);
}

void Connection::close() {
  const std::lock_guard<std::mutex> guard(lock_);
  closed_ = true;
  ::shutdown(file_, SHUT_RDWR);
  more_.notify_one();
}

bool Connection::receive(Message& message) {
  if (!read_bytes(file_, &message.head, sizeof(message.head))) {
    return false;
  }
  message.key.resize(message.head.key_size);
  message.body.resize(message.head.body_size);
  return read_bytes(file_, message.key.data(), message.key.size()) &&
      read_bytes(file_, message.body.data(), message.body.size());
}

void Connection::write_all() {
  std::unique_lock<std::mutex> lock(lock_);
  while (true) {
    more_.wait(lock, [&] { return closed_ || !outgoing_.empty(); });
    if (outgoing_.empty()) {
      return;
    }
    const auto next = std::move(outgoing_.front());
    outgoing_.pop_front();
    writes_ = true;
    const bool closed = closed_;
    lock.unlock();
    const auto& message = next.message;
    if (!closed) {
      write_bytes(file_, &message.head, sizeof(message.head)) &&
          write_bytes(file_, message.key.data(), message.key.size()) &&
          write_bytes(file_, message.body.data(), message.body.size());
    }
    if (next.written) {
      next.written();
    }
    lock.lock();
    writes_ = false;
  }
}

int listen_at(const std::string& name) {
  const int file = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address;
  const auto size = address_of(name, address);
  if (file >= 0 && (::bind(file, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(file, 64) != 0)) {
    ::close(file);
    return -1;
  }
  return file < 0 ? file : kept(file);
}

int connect_to(const std::string& name) {
  const int file = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address;
  const auto size = address_of(name, address);
  if (file >= 0 && ::connect(file, reinterpret_cast<sockaddr*>(&address), size) != 0) {
    ::close(file);
    return -1;
  }
  return file;
}

} // namespace nccl
