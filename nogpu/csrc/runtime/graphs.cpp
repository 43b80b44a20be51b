// Graphs that have been captured: handles, and launches.
#include "graphs.h"

#include <map>
#include <optional>

#include "capturing.h"

namespace standin {

namespace {

struct Instance {
  std::shared_ptr<const Graph> graph;
  std::vector<StreamName> own; // the streams of the lanes after the first
  std::mutex launching;
  std::optional<StreamName> last; // that it was launched on
};

std::mutex lock; // of both tables
std::map<void*, std::shared_ptr<Graph>>& graphs = *new std::map<void*, std::shared_ptr<Graph>>;
std::map<void*, std::shared_ptr<Instance>>& instances = *new std::map<void*, std::shared_ptr<Instance>>;

template <class Value>
Value find(const std::map<void*, Value>& table, void* handle) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto found = table.find(handle);
  return found == table.end() ? nullptr : found->second;
}

// What is removed is destroyed by the caller, without the lock.
template <class Value>
Value remove(std::map<void*, Value>& table, void* handle) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto found = table.find(handle);
  if (found == table.end()) {
    throw Refused{cudaErrorInvalidValue};
  }
  auto value = std::move(found->second);
  table.erase(found);
  return value;
}

StreamName make_stream(int device) {
  const int before = this_thread().device;
  set_current(device);
  auto* const handle = create_stream(cudaStreamNonBlocking, 0);
  set_current(before);
  return stream_of(handle).name;
}

// The events of one launch. They are forgotten at its end: later work waits for the streams.
class Events {
 public:
  explicit Events(size_t count) : states_(count) {}
  ~Events() {
    if (auto* told = watcher()) {
      for (auto& state : states_) {
        told->forget(state);
      }
    }
  }
  void record(size_t event, StreamName stream) {
    auto& state = states_[event];
    state.stream = stream;
    if (auto* told = watcher()) {
      told->recorded(state, stream);
    }
  }
  void wait(size_t event, StreamName stream) {
    if (auto* told = watcher()) {
      told->stream_waits(stream, states_[event]);
    }
  }

 private:
  std::vector<EventState> states_;
};

// Tells the watcher that all pieces until its end are those of one launch.
class Telling {
 public:
  Telling() {
    if (auto* told = watcher()) {
      told->launches_graph(true);
    }
  }
  ~Telling() {
    if (auto* told = watcher()) {
      told->launches_graph(false);
    }
  }
  Telling(const Telling&) = delete;
  Telling& operator=(const Telling&) = delete;
};

cudaError_t launch_pieces(const Graph& graph, const std::vector<StreamName>& lanes) {
  const Telling one_launch;
  Events events(graph.events);
  for (const auto& piece : graph.pieces) {
    const auto lane = lanes[piece.lane];
    switch (piece.kind) {
      case Piece::Kind::kRecord: events.record(piece.event, lane); break;
      case Piece::Kind::kWait: events.wait(piece.event, lane); break;
      case Piece::Kind::kWork:
        if (const auto wrong = piece.told ? piece.told(lane) : std::string(); !wrong.empty()) {
          keep_untold(wrong);
          return failed(wrong);
        }
        if (piece.work) {
          in_turn(lane, piece.work);
        }
    }
  }
  return cudaSuccess;
}

} // namespace

void* add_graph(std::shared_ptr<Graph> graph) {
  const std::lock_guard<std::mutex> guard(lock);
  auto* const handle = graph.get();
  graphs[handle] = std::move(graph);
  return handle;
}

std::shared_ptr<Graph> graph_of(void* handle) {
  auto graph = find(graphs, handle);
  graph = graph == nullptr ? graph_in_capture(handle) : graph;
  if (graph == nullptr) {
    throw Refused{cudaErrorInvalidValue};
  }
  return graph;
}

void destroy_graph(void* handle) {
  remove(graphs, handle);
}

void* instantiate(std::shared_ptr<const Graph> graph) {
  auto made = std::make_shared<Instance>();
  for (size_t lane = 1; lane < graph->lanes.size(); ++lane) {
    made->own.push_back(make_stream(graph->lanes[lane]));
  }
  made->graph = std::move(graph);
  const std::lock_guard<std::mutex> guard(lock);
  instances[made.get()] = made;
  return made.get();
}

void destroy_instance(void* handle) {
  remove(instances, handle);
}

// A launch comes after the launch before of the same graph, whatever its stream.
cudaError_t launch_graph(void* handle, Stream& stream) {
  const auto instance = find(instances, handle);
  if (instance == nullptr) {
    return cudaErrorInvalidValue;
  }
  refuse_if_captured(stream); // a graph within a graph
  if (stream.name.device != instance->graph->lanes.front()) {
    return failed("the stand-in for CUDA launches a graph on the device where it was captured");
  }
  const std::lock_guard<std::mutex> one_at_a_time(instance->launching);
  order(stream);
  if (instance->last && instance->last->number != stream.name.number) {
    let_wait(stream.name, *instance->last);
  }
  std::vector<StreamName> lanes{stream.name};
  lanes.insert(lanes.end(), instance->own.begin(), instance->own.end());
  for (const auto& own : instance->own) {
    let_wait(own, stream.name);
  }
  const auto result = launch_pieces(*instance->graph, lanes);
  for (const auto& own : instance->own) {
    let_wait(stream.name, own);
  }
  instance->last = stream.name;
  return result;
}

} // namespace standin
