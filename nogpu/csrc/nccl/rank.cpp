#include "rank.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>

struct ncclComm {
  std::shared_ptr<nccl::Rank> rank;
};

namespace nccl {
namespace {

std::set<ncclComm_t>& handles() {
  static auto* all = new std::set<ncclComm_t>;
  return *all;
}

Identity identity_of(int device) {
  Identity identity;
  identity.process = process_number();
  identity.device = device_number(device);
  identity.pid = getpid();
  identity.index = device;
  std::strncpy(identity.host, host_name().c_str(), sizeof(identity.host) - 1);
  if (cudaDeviceGetPCIBusId(identity.bus, sizeof(identity.bus), device) != 0) {
    std::strncpy(identity.bus, std::to_string(device).c_str(), sizeof(identity.bus) - 1);
  }
  return identity;
}

} // namespace

Rank::Rank(std::string its_key, int its_rank, int its_ranks, int its_device)
    : key(std::move(its_key)), rank(its_rank), ranks(its_ranks), device(its_device) {}

void Rank::join(const std::shared_ptr<Rank>& self) {
  std::string why_not;
  desk = find_desk(key, ranks, why_not);
  if (desk) {
    desk->join(rank, ranks, identity_of(device), self);
  } else {
    failed(ncclRemoteError, why_not);
  }
}

std::string Rank::wait_to_join() {
  Lock lock(library_lock());
  const double deadline = now() + patience() + 10;
  while (!is_joined && error == 0) {
    expire();
    if (error == 0) {
      changed().wait_for(lock, std::chrono::milliseconds(100));
    }
    if (!is_joined && error == 0 && now() > deadline) {
      failed(ncclRemoteError, "the process that made the communicator's id does not answer");
    }
  }
  return error == 0 ? "" : text;
}

uint64_t Rank::post(const Call& call, std::shared_ptr<Launch> launch, char* to, std::shared_ptr<Before> before) {
  const auto number = next_++;
  open_[number] = {std::move(launch), to};
  desk->post(rank, number, call, std::move(before));
  return number;
}

void Rank::give(uint64_t number, double factor, const char* data, size_t bytes, char* to) {
  if (error == 0 && !has_left) {
    desk->give(rank, number, factor, data, bytes, to);
  }
}

void Rank::leave(const std::string& how) {
  has_left = true;
  for (auto& each : std::exchange(open_, {})) {
    each.second.launch->befores.clear();
    finish(*each.second.launch, Launch::kDone, "");
  }
  if (desk) {
    desk->leave(rank, how);
  }
}

std::string Rank::flush() {
  Launches launches;
  {
    const Lock lock(library_lock());
    for (const auto& each : open_) {
      launches.push_back(each.second.launch);
    }
  }
  return wait_for(launches);
}

void Rank::joined() {
  is_joined = true;
  changed().notify_all();
}

void Rank::matched(uint64_t number, const Matched&, const Befores& befores) {
  const auto found = open_.find(number);
  if (found != open_.end()) {
    auto& all = found->second.launch->befores;
    all.insert(all.end(), befores.begin(), befores.end());
  }
}

void Rank::done(uint64_t number, std::string data, std::function<void()> told) {
  const auto found = open_.find(number);
  if (found != open_.end()) {
    const auto piece = found->second;
    open_.erase(found);
    if (!data.empty() && piece.to != nullptr) {
      std::memcpy(piece.to, data.data(), data.size());
    }
    if (--piece.launch->calls == 0) {
      finish(*piece.launch, Launch::kDone, "");
    }
  }
  told();
}

void Rank::failed(int code, const std::string& why) {
  if (error == 0) {
    error = code;
    text = why;
  }
  // The launches stay known, so that a later abort of the communicator frees its streams.
  for (auto& each : open_) {
    finish(*each.second.launch, Launch::kFailed, text);
  }
  changed().notify_all();
}

std::shared_ptr<Rank> rank_of(ncclComm_t comm) {
  return handles().count(comm) ? comm->rank : nullptr;
}

ncclComm_t new_handle(const std::shared_ptr<Rank>& rank) {
  auto* comm = new ncclComm{rank};
  handles().insert(comm);
  return comm;
}

// The handle itself stays: an address that is used again would make a handle that was destroyed look alive.
void drop_handle(ncclComm_t comm) {
  handles().erase(comm);
  comm->rank.reset();
}

} // namespace nccl
