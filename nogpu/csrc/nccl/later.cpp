#include "later.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <stdexcept>

namespace nccl {
namespace {

thread_local int launching = 0;
std::atomic<standin::Watcher*> inside{nullptr};

using Key = std::pair<int, uint32_t>;
Key key_of(standin::StreamName stream) {
  return {stream.device, stream.number};
}

// Launches that are not known to be done, by the streams and events that come after them.
struct Kept {
  std::map<Key, Launches> streams;
  std::map<const standin::EventState*, Launches> events;
};
Kept& kept() {
  static auto* all = new Kept;
  return *all;
}
std::atomic<bool> keeps_any{false};

void note_size() {
  keeps_any = !kept().streams.empty() || !kept().events.empty();
}

void add(Launches& to, const Launches& launches) {
  for (const auto& each : launches) {
    if (std::find(to.begin(), to.end(), each) == to.end()) {
      to.push_back(each);
    }
  }
}

template <typename Map, typename K>
Launches look(Map Kept::*map, const K& key) {
  if (!keeps_any) {
    return {};
  }
  const Lock lock(library_lock());
  const auto found = (kept().*map).find(key);
  return found == (kept().*map).end() ? Launches{} : found->second;
}

// Waits, and forgets what is done. What has failed stays: the stream is of no use until its communicator is aborted.
std::string resolve(standin::StreamName stream) {
  const auto launches = look(&Kept::streams, key_of(stream));
  if (launches.empty()) {
    return "";
  }
  const auto text = wait_for(launches);
  Befores befores;
  {
    const Lock lock(library_lock());
    auto& rest = kept().streams[key_of(stream)];
    const auto is_done = [&](const std::shared_ptr<Launch>& each) { return each->state == Launch::kDone; };
    for (const auto& each : rest) {
      if (is_done(each)) {
        befores.insert(befores.end(), each->befores.begin(), each->befores.end());
      }
    }
    rest.erase(std::remove_if(rest.begin(), rest.end(), is_done), rest.end());
    if (rest.empty()) {
      kept().streams.erase(key_of(stream));
    }
    note_size();
  }
  come_after(stream, befores);
  return text;
}

// The runtime makes an error of it, with this text.
void must_be_done(const std::string& text, const char* call) {
  if (!text.empty()) {
    throw std::runtime_error(std::string(call) + " waits for a collective that has failed: " + text);
  }
}

bool are_open(const Launches& launches) {
  if (launches.empty()) {
    return false;
  }
  Lock lock(library_lock());
  expire();
  return std::any_of(launches.begin(), launches.end(), [](const auto& each) { return each->state == Launch::kOpen; });
}

// What is wrong with work that is launched on the stream now.
std::string failed_before(standin::StreamName stream, const std::string& name) {
  const auto text = keeps_any && !launching ? resolve(stream) : std::string();
  return text.empty() ? text : name + " comes after a collective that has failed: " + text;
}

class Around final : public standin::Watcher {
 public:
  std::string launch(standin::StreamName stream, const char* name, const standin::Part* parts, size_t count,
                     const standin::CopyInfo* copy) override {
    auto wrong = failed_before(stream, name);
    auto* watcher = clocks();
    return watcher && wrong.empty() ? watcher->launch(stream, name, parts, count, copy) : wrong;
  }

  std::function<std::string(standin::StreamName)> keep(standin::StreamName stream, const char* name,
                                                       const standin::Part* parts, size_t count,
                                                       const standin::CopyInfo* copy) override {
    auto* watcher = clocks();
    if (!watcher) {
      return Watcher::keep(stream, name, parts, count, copy);
    }
    return [told = watcher->keep(stream, name, parts, count, copy), name = std::string(name)](
               standin::StreamName launched_on) {
      auto wrong = failed_before(launched_on, name);
      return wrong.empty() ? told(launched_on) : wrong;
    };
  }

  void launches_graph(bool begins) override {
    if (auto* watcher = clocks()) {
      watcher->launches_graph(begins);
    }
  }

  void recorded(standin::EventState& event, standin::StreamName stream) override {
    if (keeps_any) {
      const Lock lock(library_lock());
      const auto found = kept().streams.find(key_of(stream));
      kept().events.erase(&event);
      if (found != kept().streams.end()) {
        kept().events[&event] = found->second;
      }
      note_size();
    }
    if (auto* watcher = clocks()) {
      watcher->recorded(event, stream);
    }
  }

  void stream_waits(standin::StreamName stream, const standin::EventState& event) override {
    const auto launches = look(&Kept::events, &event);
    if (!launches.empty()) {
      const Lock lock(library_lock());
      add(kept().streams[key_of(stream)], launches);
    }
    if (auto* watcher = clocks()) {
      watcher->stream_waits(stream, event);
    }
  }

  void stream_waits_for_stream(standin::StreamName later, standin::StreamName earlier) override {
    const auto launches = look(&Kept::streams, key_of(earlier));
    if (!launches.empty()) {
      const Lock lock(library_lock());
      add(kept().streams[key_of(later)], launches);
    }
    if (auto* watcher = clocks()) {
      watcher->stream_waits_for_stream(later, earlier);
    }
  }

  void host_waited(const standin::EventState& event, const char* call) override {
    const auto launches = look(&Kept::events, &event);
    must_be_done(wait_for(launches), call);
    if (auto* watcher = clocks()) {
      watcher->host_waited(event, call);
      for (const auto& each : launches) {
        for (const auto& before : each->befores) {
          watcher->host_waited(before->state, call);
        }
      }
    }
  }

  void host_waited_for_stream(standin::StreamName stream, const char* call) override {
    if (keeps_any) {
      must_be_done(resolve(stream), call);
    }
    if (auto* watcher = clocks()) {
      watcher->host_waited_for_stream(stream, call);
    }
  }

  void host_waited_for_device(int device, const char* call) override {
    std::string text;
    for (const auto stream : streams_of(device)) {
      const auto its = resolve(stream);
      text = text.empty() ? its : text;
    }
    must_be_done(text, call);
    if (auto* watcher = clocks()) {
      watcher->host_waited_for_device(device, call);
    }
  }

  bool host_asks(const standin::EventState& event) override {
    const auto launches = look(&Kept::events, &event);
    auto* watcher = clocks();
    if (are_open(launches)) {
      return false;
    }
    bool is_done = watcher == nullptr || watcher->host_asks(event);
    for (const auto& each : launches) {
      for (const auto& before : each->befores) {
        is_done = (watcher == nullptr || watcher->host_asks(before->state)) && is_done;
      }
    }
    return is_done;
  }

  bool host_asks_stream(standin::StreamName stream) override {
    if (are_open(look(&Kept::streams, key_of(stream)))) {
      return false;
    }
    if (keeps_any) {
      resolve(stream);
    }
    auto* watcher = clocks();
    return watcher == nullptr || watcher->host_asks_stream(stream);
  }

  void host_function(standin::StreamName stream, bool begins) override {
    if (begins && keeps_any) {
      must_be_done(resolve(stream), "cudaLaunchHostFunc");
    }
    if (auto* watcher = clocks()) {
      watcher->host_function(stream, begins);
    }
  }

  void forget(standin::EventState& event) override {
    if (keeps_any) {
      const Lock lock(library_lock());
      kept().events.erase(&event);
      note_size();
    }
    if (auto* watcher = clocks()) {
      watcher->forget(event);
    }
  }

  void allocated(standin::Memory& memory) override {
    if (auto* watcher = clocks()) {
      watcher->allocated(memory);
    }
  }

  void freed(standin::Memory& memory) override {
    if (auto* watcher = clocks()) {
      watcher->freed(memory);
    }
  }

 private:
  static std::vector<standin::StreamName> streams_of(int device) {
    std::vector<standin::StreamName> result;
    if (keeps_any) {
      const Lock lock(library_lock());
      for (const auto& each : kept().streams) {
        if (each.first.first == device) {
          result.push_back({each.first.first, each.first.second});
        }
      }
    }
    return result;
  }
};

} // namespace

void attach() {
  static auto* around = new Around;
  auto* now_there = standin::watcher();
  if (now_there != around) {
    inside = now_there;
    standin::watch(around);
  }
}

standin::Watcher* clocks() {
  return inside;
}

void put(standin::StreamName stream, const std::shared_ptr<Launch>& launch) {
  add(kept().streams[key_of(stream)], {launch});
  note_size();
}

void drop(standin::StreamName stream, const std::shared_ptr<Launch>& launch) {
  const auto found = kept().streams.find(key_of(stream));
  if (found == kept().streams.end() || launch->state != Launch::kDone || !launch->befores.empty()) {
    return;
  }
  auto& all = found->second;
  all.erase(std::remove(all.begin(), all.end(), launch), all.end());
  if (all.empty()) {
    kept().streams.erase(found);
  }
  note_size();
}

Launches open_on(standin::StreamName stream) {
  Launches result;
  const auto found = kept().streams.find(key_of(stream));
  if (found != kept().streams.end()) {
    std::copy_if(found->second.begin(), found->second.end(), std::back_inserter(result),
                 [](const auto& each) { return each->state != Launch::kDone; });
  }
  return result;
}

void come_after(standin::StreamName stream, const Befores& befores) {
  if (auto* watcher = clocks()) {
    for (const auto& each : befores) {
      watcher->stream_waits(stream, each->state);
    }
  }
}

Launching::Launching() {
  ++launching;
}

Launching::~Launching() {
  --launching;
}

} // namespace nccl
