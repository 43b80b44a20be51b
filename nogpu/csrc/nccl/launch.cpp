// How the calls of a group are launched. See group.h for what is assumed of their order.
#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>

#include "group.h"
#include "numbers.h"

namespace nccl {
namespace {

// What one communicator launches.
struct Batch {
  std::shared_ptr<Rank> rank;
  std::vector<Issued*> calls;
  std::vector<standin::StreamName> streams; // each once; the first one has the launch
  std::shared_ptr<Before> before;
  std::shared_ptr<Launch> launch;
  std::vector<uint64_t> numbers; // of its calls
  std::vector<standin::Part> parts;
};

bool is_same(standin::StreamName a, standin::StreamName b) {
  return a.device == b.device && a.number == b.number;
}

std::vector<Batch> batches_of(std::vector<Issued>& calls) {
  std::vector<Batch> result;
  for (auto& call : calls) {
    auto found = std::find_if(result.begin(), result.end(), [&](const Batch& each) { return each.rank == call.rank; });
    if (found == result.end()) {
      result.push_back({call.rank, {}, {}, nullptr, std::make_shared<Launch>(), {}, {}});
      found = std::prev(result.end());
    }
    found->calls.push_back(&call);
    const auto is_there = [&](standin::StreamName name) { return is_same(name, call.stream); };
    if (std::none_of(found->streams.begin(), found->streams.end(), is_there)) {
      found->streams.push_back(call.stream);
    }
  }
  return result;
}

// ---- the memory that a launch touches

size_t bytes_read(const Issued& call) {
  return elements_read(call.call, call.rank->rank, call.rank->ranks) * element_size(call.call.dtype);
}

size_t bytes_written(const Issued& call) {
  return elements_written(call.call, call.rank->rank, call.rank->ranks) * element_size(call.call.dtype);
}

bool is_in_place(const Issued& call) {
  return call.call.kind == Kind::kBroadcast && call.call.peer == call.rank->rank && call.send == call.receive;
}

bool overlap(const standin::Part& a, const standin::Part& b) {
  return a.memory == b.memory && a.begin < b.end && b.begin < a.end;
}

// Fills the parts. Returns what is wrong with them: NCCL runs the calls of a group at the same time.
std::string find_parts(Batch& batch) {
  for (const auto* call : batch.calls) {
    const auto first = batch.parts.size();
    const auto add = [&](const void* address, size_t bytes, bool writes, const char* argument) {
      const auto part = standin::part_of(address, bytes, writes, argument);
      if (bytes && part.memory) {
        batch.parts.push_back(part);
      }
    };
    add(call->send, bytes_read(*call), false, "sendbuff");
    add(call->multiple.address, call->multiple.address ? element_size(call->call.dtype) : 0, false, "scalar");
    add(call->receive, is_in_place(*call) ? 0 : bytes_written(*call), true, "recvbuff");
    for (auto mine = first; mine < batch.parts.size(); ++mine) {
      for (size_t other = 0; other < first; ++other) {
        const auto& a = batch.parts[other];
        const auto& b = batch.parts[mine];
        if (overlap(a, b) && (a.writes || b.writes)) {
          return describe(call->call) + " for rank " + std::to_string(batch.rank->rank) + " " +
              (b.writes ? "writes" : "reads") + " memory that another call of the same group " +
              (a.writes ? "writes" : "reads") + ", and NCCL runs the calls of a group at the same time. End the group "
              "between them";
        }
      }
    }
  }
  return "";
}

const char* name_of(const Batch& batch) {
  static constexpr const char* kNames[] = {"ncclAllReduce", "ncclBroadcast", "ncclReduce",  "ncclAllGather",
                                           "ncclReduceScatter", "ncclAlltoAll", "ncclGather", "ncclScatter",
                                           "ncclSend",      "ncclRecv"};
  const auto kind = batch.calls.front()->call.kind;
  const bool all = std::all_of(batch.calls.begin(), batch.calls.end(),
                               [&](const Issued* call) { return call->call.kind == kind; });
  return all ? kNames[static_cast<int>(kind)] : "ncclGroupEnd";
}

// ---- launches of several threads

struct Active {
  uint64_t thread;
  std::set<int> devices;
};
std::vector<const Active*>& active() {
  static auto* all = new std::vector<const Active*>;
  return *all;
}

// Marks the devices that a thread launches on. Two threads that launch on two devices at the same time may do so in
// different orders on the two.
class Window {
 public:
  explicit Window(const std::vector<Batch>& batches) {
    mine_.thread = thread_number();
    for (const auto& batch : batches) {
      mine_.devices.insert(batch.rank->device);
    }
    const Lock lock(library_lock());
    for (const auto* other : active()) {
      std::vector<int> both;
      std::set_intersection(mine_.devices.begin(), mine_.devices.end(), other->devices.begin(), other->devices.end(),
                            std::back_inserter(both));
      if (both.size() > 1) {
        error = "two threads launch collectives on cuda:" + std::to_string(both[0]) + " and cuda:" +
            std::to_string(both[1]) + " at the same time. The devices may get them in different orders and wait for "
            "each other for ever: let the threads take turns by a lock";
      }
    }
    active().push_back(&mine_);
  }
  ~Window() {
    const Lock lock(library_lock());
    active().erase(std::find(active().begin(), active().end(), &mine_));
  }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  std::string error;

 private:
  Active mine_;
};

// ---- the steps of a launch

// The number of a launch on its device.
uint64_t next_on(int device) {
  static auto* numbers = new std::map<int, uint64_t>;
  return ++(*numbers)[device];
}

// No rank may wait for what will not be launched.
ncclResult_t cancel_all(std::vector<Batch>& batches, const std::string& text) {
  Lock lock(library_lock());
  for (auto& batch : batches) {
    for (const auto number : batch.numbers) {
      batch.rank->desk->cancel(batch.rank->rank, number, text);
    }
  }
  settle(lock);
  return failure(ncclUnhandledCudaError, text);
}

ncclResult_t fail_all(std::vector<Batch>& batches, ncclResult_t result, const std::string& text) {
  const Lock lock(library_lock());
  for (auto& batch : batches) {
    if (!batch.numbers.empty()) {
      batch.rank->desk->fail(result, text);
    }
  }
  return failure(result, text);
}

void give(const Batch& batch) {
  for (size_t i = 0; i < batch.calls.size(); ++i) {
    const auto& call = *batch.calls[i];
    const double factor =
        call.multiple.address ? read_number(call.call.dtype, call.multiple.address) : call.multiple.factor;
    batch.rank->give(batch.numbers[i], factor, call.send, bytes_read(call), bytes_written(call) ? call.receive : nullptr);
  }
}

// Every rank's calls are known to the meeting before any rank launches.
ncclResult_t post(std::vector<Batch>& batches) {
  static uint64_t groups = 0;
  const Lock lock(library_lock());
  const auto group = ++groups;
  for (auto& batch : batches) {
    const auto issued = next_on(batch.rank->device);
    batch.launch->deadline = now() + patience();
    for (auto* call : batch.calls) {
      call->call.issued = issued;
      call->call.group = group;
      call->call.thread = thread_number();
      if (batch.rank->error == 0) {
        ++batch.launch->calls;
        batch.numbers.push_back(batch.rank->post(call->call, batch.launch, call->receive, batch.before));
      }
    }
  }
  for (const auto& batch : batches) {
    if (batch.rank->error != 0) {
      return failure(static_cast<ncclResult_t>(batch.rank->error), batch.rank->text);
    }
  }
  return ncclSuccess;
}

// What one rank launches, as the clocks see it.
std::string announce(Batch& batch) {
  auto* watcher = clocks();
  const auto stream = batch.streams.front();
  Befores befores;
  {
    const Lock lock(library_lock());
    befores = batch.launch->befores;
  }
  if (std::none_of(batch.parts.begin(), batch.parts.end(), [](const standin::Part& part) { return !part.writes; })) {
    come_after(stream, befores);
  }
  const Launching launching;
  auto error = standin::announce(stream, name_of(batch), batch.parts.data(), batch.parts.size());
  for (size_t i = 1; watcher && i < batch.streams.size(); ++i) {
    watcher->stream_waits_for_stream(batch.streams[i], stream);
  }
  if (launch_seconds() > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(launch_seconds()));
  }
  return error;
}

// Hands over the data, or has that done as soon as earlier collectives on the streams are.
void begin(Batch& batch) {
  auto& launch = *batch.launch;
  Launches earlier;
  for (const auto stream : batch.streams) {
    for (const auto& each : open_on(stream)) {
      if (std::find(earlier.begin(), earlier.end(), each) == earlier.end()) {
        earlier.push_back(each);
      }
    }
  }
  const auto rank = batch.rank;
  launch.refuse = [rank](const std::string& text) {
    rank->desk->fail(ncclRemoteError, "a collective comes after another one that has failed: " + text);
  };
  for (const auto stream : batch.streams) {
    put(stream, batch.launch);
  }
  for (const auto& each : earlier) {
    if (each->state == Launch::kFailed) {
      launch.refuse(each->text);
      return;
    }
    each->holds.push_back(batch.launch);
    ++launch.held_by;
  }
  if (launch.held_by == 0) {
    give(batch);
    return;
  }
  // The calls are copied: they are the group's, which ends before.
  auto calls = std::make_shared<std::vector<Issued>>();
  auto later = std::make_shared<Batch>();
  later->rank = batch.rank;
  later->numbers = batch.numbers;
  for (const auto* call : batch.calls) {
    calls->push_back(*call);
  }
  for (auto& call : *calls) {
    later->calls.push_back(&call);
  }
  launch.give = [calls, later] { give(*later); };
}

} // namespace

ncclResult_t launch(std::vector<Issued>& calls) {
  attach();
  auto batches = batches_of(calls);
  const Window window(batches);
  if (!window.error.empty()) {
    return failure(ncclInvalidUsage, window.error);
  }
  for (auto& batch : batches) {
    const auto error = find_parts(batch);
    if (!error.empty()) {
      return failure(ncclInvalidUsage, error);
    }
    for (size_t i = 1; i < batch.streams.size(); ++i) {
      standin::let_wait(batch.streams.front(), batch.streams[i]);
    }
    batch.before = clocks() ? std::make_shared<Before>(batch.streams.front()) : nullptr;
  }
  const auto posted = post(batches);
  if (posted != ncclSuccess) {
    return fail_all(batches, posted, last_failure());
  }
  for (auto& batch : batches) {
    const OnDevice on(batch.rank->device);
    const auto error = announce(batch);
    if (!error.empty()) {
      return cancel_all(batches, error);
    }
  }
  Lock lock(library_lock());
  for (auto& batch : batches) {
    begin(batch);
  }
  settle(lock);
  for (const auto& batch : batches) {
    for (const auto stream : batch.streams) {
      drop(stream, batch.launch);
    }
  }
  return ncclSuccess;
}

} // namespace nccl
