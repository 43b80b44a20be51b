#include "process.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>

namespace nccl {
namespace {

double from_environment(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  char* end = nullptr;
  const double value = text ? std::strtod(text, &end) : otherwise;
  return text && (end == text || value < 0) ? otherwise : value;
}

uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t x = a + 0x9e3779b97f4a7c15u * (b + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

} // namespace

std::mutex& library_lock() {
  static auto* lock = new std::mutex; // never destroyed: threads may wait for it while the process ends
  return *lock;
}

std::condition_variable& changed() {
  static auto* condition = new std::condition_variable;
  return *condition;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double patience() {
  return from_environment("NOGPU_NCCL_SECONDS", 600);
}

double launch_seconds() {
  static const double seconds = from_environment("NOGPU_NCCL_LAUNCH_SECONDS", 0);
  return seconds;
}

uint64_t process_number() {
  static std::mutex lock;
  static pid_t owner = 0;
  static uint64_t number = 0;
  const std::lock_guard<std::mutex> guard(lock);
  if (owner != getpid()) {
    owner = getpid();
    std::random_device random;
    number = mixed(uint64_t{random()} << 32 | random(), static_cast<uint64_t>(owner)) | 1;
  }
  return number;
}

uint64_t thread_number() {
  static std::atomic<uint64_t> threads{0};
  thread_local const uint64_t mine = ++threads;
  return mixed(process_number(), ~mine);
}

uint64_t device_number(int device) {
  return mixed(process_number(), static_cast<uint64_t>(device));
}

std::string host_name() {
  if (const char* text = std::getenv("NCCL_HOSTID")) {
    return text;
  }
  char name[64] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

} // namespace nccl
