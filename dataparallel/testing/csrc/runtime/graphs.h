// Graphs: work that streams were given while they captured. It is kept, and given to a stream again at every launch.
//
// A capture has a lane for each of its streams. The first is that on which it began; others join by waiting for an event
// that was recorded in it. At a launch, the first lane is the stream of the launch, and each other one is a stream of the
// graph's own, so that the watcher sees what the lanes do to each other.
#pragma once

#include "state.h"

namespace standin {

// An object of the program that lives as long as graphs refer to it.
class UserObject {
 public:
  UserObject(void* object, cudaHostFn_t destroy, unsigned references)
      : object_(object), destroy_(destroy), references_(references) {}
  void retain(unsigned count) {
    references_ += count;
  }
  void release(unsigned count); // with the last reference, the object is destroyed

 private:
  void* const object_;
  const cudaHostFn_t destroy_;
  std::atomic<unsigned> references_;
};

struct Piece {
  enum class Kind { kWork, kRecord, kWait };
  Kind kind = Kind::kWork;
  size_t lane = 0;
  std::function<std::string(StreamName)> told; // the watcher's: see Watcher::keep
  std::function<void()> work; // null if there is none
  size_t event = 0; // which is recorded, or waited for
};

struct Graph {
  ~Graph();
  std::vector<int> lanes; // the device of each
  std::vector<Piece> pieces;
  size_t events = 0;
  std::vector<std::pair<UserObject*, unsigned>> retained;
};

// ---- captures (capturing.cpp)

bool is_capturing(const Stream& stream);
cudaStreamCaptureStatus capture_status(const Stream& stream, unsigned long long* id, cudaGraph_t* graph);
void begin_capture(Stream& stream, cudaStreamCaptureMode mode);
std::shared_ptr<Graph> end_capture(Stream& stream); // throws Refused; a capture that is no good has ended then
std::shared_ptr<Graph> graph_in_capture(void* handle); // null if it is none

// Work of a stream that captures, told by `announce` and then passed by `in_turn`. Returns what is wrong.
std::string keep(Stream& stream, const char* name, const Part* parts, size_t count, const CopyInfo* copy, Turn turn);
void keep_work(Stream& stream, std::function<void()> work);

void record_in_capture(Event& event, Stream& stream);
// True if the wait has become a part of a capture.
bool wait_in_capture(Stream& stream, const Event& event);
// Refuses what the host may not ask or do with this stream or event, and ends what the capture is good for.
void refuse_if_captured(const Event& event);
void refuse_if_captured(Stream& stream);
// The same for calls that CUDA forbids while anybody captures, by the modes of the captures and of the calling thread.
void refuse_while_capturing();
void exchange_mode(cudaStreamCaptureMode& mode); // of the calling thread

// ---- handles and launches (graphs.cpp)

void* add_graph(std::shared_ptr<Graph> graph);
std::shared_ptr<Graph> graph_of(void* handle); // throws Refused
void destroy_graph(void* handle);
void* instantiate(std::shared_ptr<const Graph> graph);
void destroy_instance(void* handle);
cudaError_t launch_graph(void* handle, Stream& stream);

} // namespace standin
