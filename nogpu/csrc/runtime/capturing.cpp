// Captures: which streams take part, what is kept, and what CUDA forbids meanwhile.
//
// The rules are those of the CUDA programming guide, "Stream Capture", and of the page on
// cudaThreadExchangeStreamCaptureMode. A capture that has met something forbidden is invalid: all that follows in its
// streams is refused, until it is ended.
#include "capturing.h"

#include <set>
#include <thread>

namespace standin {

// How many pieces of each lane come before something.
using Position = std::vector<size_t>;

struct Capture {
  unsigned long long id = 0;
  std::thread::id thread;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::vector<Stream*> streams; // by lane
  std::vector<Position> known; // by lane: what it comes after, itself included
  bool is_invalid = false;
};

struct CapturedEvent {
  std::weak_ptr<Capture> capture;
  size_t event = 0;
  Position before;
};

namespace {

std::mutex lock; // of all captures
std::set<Capture*>& ongoing = *new std::set<Capture*>;
std::atomic<size_t> count{0};
unsigned long long last_id = 0;
thread_local cudaStreamCaptureMode own_mode = cudaStreamCaptureModeGlobal;

void join(Position& position, const Position& other) {
  position.resize(std::max(position.size(), other.size()), 0);
  for (size_t lane = 0; lane < other.size(); ++lane) {
    position[lane] = std::max(position[lane], other[lane]);
  }
}

size_t lane_of(const Capture& capture, const Stream& stream) {
  return static_cast<size_t>(std::find(capture.streams.begin(), capture.streams.end(), &stream) -
                             capture.streams.begin());
}

// With `lock` held.
void add_lane(const std::shared_ptr<Capture>& capture, Stream& stream) {
  capture->streams.push_back(&stream);
  capture->known.emplace_back();
  capture->graph->lanes.push_back(stream.name.device);
  stream.capture = capture;
  stream.captures = true;
}

Piece& add_piece(Capture& capture, Stream& stream, Piece::Kind kind) {
  const auto lane = lane_of(capture, stream);
  auto& known = capture.known[lane];
  known.resize(std::max(known.size(), lane + 1), 0);
  ++known[lane];
  auto& piece = capture.graph->pieces.emplace_back();
  piece.kind = kind;
  piece.lane = lane;
  return piece;
}

[[noreturn]] void refuse(Capture& capture, cudaError_t error) {
  capture.is_invalid = true;
  throw Refused{error};
}

Capture& valid(Capture& capture) {
  if (capture.is_invalid) {
    throw Refused{cudaErrorStreamCaptureInvalidated};
  }
  return capture;
}

// All that the lanes were given comes before the end of the first one.
bool is_joined(const Capture& capture) {
  const auto& end = capture.known.front();
  for (size_t lane = 1; lane < capture.known.size(); ++lane) {
    const auto& own = capture.known[lane];
    const auto given = own.size() > lane ? own[lane] : 0;
    if (given > (end.size() > lane ? end[lane] : 0)) {
      return false;
    }
  }
  return true;
}

// Refuses a call that meets captures, and makes these invalid.
template <typename Met>
void refuse_if_it_meets(cudaError_t error, const Met& is_met) {
  if (count.load(std::memory_order_relaxed) == 0) {
    return;
  }
  const std::lock_guard<std::mutex> guard(lock);
  bool is_forbidden = false;
  for (auto* capture : ongoing) {
    if (is_met(*capture)) {
      capture->is_invalid = is_forbidden = true;
    }
  }
  if (is_forbidden) {
    throw Refused{error};
  }
}

template <typename Met>
bool any_stream(const Capture& capture, int device, const Met& is_met) {
  return std::any_of(capture.streams.begin(), capture.streams.end(), [&](const Stream* stream) {
    return stream->name.device == device && is_met(*stream);
  });
}

} // namespace

bool is_capturing(const Stream& stream) {
  return stream.captures.load(std::memory_order_relaxed);
}

bool anybody_captures() {
  return count.load(std::memory_order_relaxed) > 0;
}

bool is_capturing(StreamName stream) {
  return is_capturing(stream_named(stream));
}

cudaStreamCaptureStatus capture_status(const Stream& stream, unsigned long long* id, cudaGraph_t* graph) {
  const std::lock_guard<std::mutex> guard(lock);
  if (!stream.capture) {
    return cudaStreamCaptureStatusNone;
  }
  if (id != nullptr) {
    *id = stream.capture->id;
  }
  if (graph != nullptr) {
    *graph = reinterpret_cast<cudaGraph_t>(stream.capture->graph.get());
  }
  return stream.capture->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

void begin_capture(Stream& stream, cudaStreamCaptureMode mode) {
  if (stream.name.number == 0) {
    throw Refused{cudaErrorStreamCaptureUnsupported};
  }
  const std::lock_guard<std::mutex> guard(lock);
  if (stream.capture) {
    throw Refused{cudaErrorIllegalState};
  }
  auto capture = std::make_shared<Capture>();
  capture->id = ++last_id;
  capture->thread = std::this_thread::get_id();
  capture->mode = mode;
  add_lane(capture, stream);
  ongoing.insert(capture.get());
  ++count;
}

std::shared_ptr<Graph> end_capture(Stream& stream) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto capture = stream.capture;
  if (!capture) {
    throw Refused{cudaErrorIllegalState};
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
    refuse(*capture, cudaErrorStreamCaptureWrongThread);
  }
  if (capture->streams.front() != &stream) {
    refuse(*capture, cudaErrorStreamCaptureUnmatched);
  }
  for (auto* each : capture->streams) {
    each->captures = false;
    each->capture = nullptr;
  }
  ongoing.erase(capture.get());
  --count;
  valid(*capture);
  if (!is_joined(*capture)) {
    throw Refused{cudaErrorStreamCaptureUnjoined};
  }
  return capture->graph;
}

std::shared_ptr<Graph> graph_in_capture(void* handle) {
  const std::lock_guard<std::mutex> guard(lock);
  for (auto* capture : ongoing) {
    if (capture->graph.get() == handle) {
      return capture->graph;
    }
  }
  return nullptr;
}

std::string keep(Stream& stream, const char* name, const Part* parts, size_t number, const CopyInfo* copy, Turn turn) {
  if (turn == Turn::kAtOnce) {
    const std::lock_guard<std::mutex> guard(lock);
    if (stream.capture) {
      valid(*stream.capture).is_invalid = true;
    }
    return std::string("the stand-in for CUDA cannot capture ") + name + ": it is done when it is called";
  }
  auto* told = watcher();
  auto kept = told == nullptr ? nullptr : told->keep(stream.name, name, parts, number, copy);
  const std::lock_guard<std::mutex> guard(lock);
  if (stream.capture) {
    add_piece(valid(*stream.capture), stream, Piece::Kind::kWork).told = std::move(kept);
  }
  return {};
}

void keep_work(Stream& stream, std::function<void()> work) {
  const std::lock_guard<std::mutex> guard(lock);
  if (!stream.capture || stream.capture->is_invalid) {
    return; // there will be no graph that does the work
  }
  auto& pieces = stream.capture->graph->pieces;
  const auto lane = lane_of(*stream.capture, stream);
  const auto last = std::find_if(pieces.rbegin(), pieces.rend(), [&](const Piece& piece) { return piece.lane == lane; });
  last->work = std::move(work);
}

void record_in_capture(Event& event, Stream& stream) {
  const std::lock_guard<std::mutex> guard(lock);
  auto& capture = valid(*stream.capture);
  auto& piece = add_piece(capture, stream, Piece::Kind::kRecord);
  piece.event = capture.graph->events++;
  event.captured = std::make_shared<CapturedEvent>(
      CapturedEvent{stream.capture, piece.event, capture.known[lane_of(capture, stream)]});
}

bool wait_in_capture(Stream& stream, const Event& event) {
  if (!event.captured && !is_capturing(stream)) {
    return false;
  }
  const std::lock_guard<std::mutex> guard(lock);
  if (!event.captured) {
    if (event.recorded) {
      refuse(*stream.capture, cudaErrorStreamCaptureIsolation);
    }
    return true;
  }
  const auto capture = event.captured->capture.lock();
  if (!capture || ongoing.count(capture.get()) == 0) {
    throw Refused{cudaErrorCapturedEvent};
  }
  if (stream.capture && stream.capture != capture) {
    stream.capture->is_invalid = true;
    refuse(*capture, cudaErrorStreamCaptureMerge);
  }
  valid(*capture);
  if (!stream.capture) {
    if (stream.name.number == 0) {
      refuse(*capture, cudaErrorStreamCaptureImplicit);
    }
    add_lane(capture, stream);
  }
  add_piece(*capture, stream, Piece::Kind::kWait).event = event.captured->event;
  join(capture->known[lane_of(*capture, stream)], event.captured->before);
  return true;
}

void refuse_if_captured(const Event& event) {
  if (!event.captured) {
    return;
  }
  const std::lock_guard<std::mutex> guard(lock);
  if (const auto capture = event.captured->capture.lock()) {
    capture->is_invalid = true;
  }
  throw Refused{cudaErrorCapturedEvent};
}

void refuse_if_captured(Stream& stream) {
  if (!is_capturing(stream)) {
    return;
  }
  const std::lock_guard<std::mutex> guard(lock);
  if (stream.capture) {
    refuse(*stream.capture, cudaErrorStreamCaptureUnsupported);
  }
}

void refuse_while_capturing() {
  if (own_mode == cudaStreamCaptureModeRelaxed) {
    return;
  }
  refuse_if_it_meets(cudaErrorStreamCaptureUnsupported, [](const Capture& capture) {
    const bool is_own = capture.thread == std::this_thread::get_id();
    return is_own ? capture.mode != cudaStreamCaptureModeRelaxed
                  : capture.mode == cudaStreamCaptureModeGlobal && own_mode == cudaStreamCaptureModeGlobal;
  });
}

void refuse_while_capturing(int device) {
  refuse_while_capturing();
  refuse_if_it_meets(cudaErrorStreamCaptureUnsupported, [&](const Capture& capture) {
    return any_stream(capture, device, [](const Stream&) { return true; });
  });
}

void refuse_legacy_work(const Stream& stream) {
  if (stream.name.number != 0) {
    return;
  }
  refuse_if_it_meets(cudaErrorStreamCaptureImplicit, [&](const Capture& capture) {
    return any_stream(capture, stream.name.device,
                      [](const Stream& other) { return (other.flags & cudaStreamNonBlocking) == 0; });
  });
}

void exchange_mode(cudaStreamCaptureMode& mode) {
  std::swap(own_mode, mode);
}

} // namespace standin
