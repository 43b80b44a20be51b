// Captures: streams that keep what they are given, in a graph.
#pragma once

#include "graph.h"

namespace standin {

bool is_capturing(const Stream& stream);
cudaStreamCaptureStatus capture_status(const Stream& stream, unsigned long long* id, cudaGraph_t* graph);
void begin_capture(Stream& stream, cudaStreamCaptureMode mode);
std::shared_ptr<Graph> end_capture(Stream& stream); // throws Refused; an invalid capture has ended then
std::shared_ptr<Graph> graph_in_capture(void* handle); // null if it is none

// Work of a stream that captures, told by `announce` and then passed by `in_turn`. Returns what is wrong, and throws
// Refused if the capture is invalid.
std::string keep(Stream& stream, const char* name, const Part* parts, size_t count, const CopyInfo* copy, Turn turn);
void keep_work(Stream& stream, std::function<void()> work);

void record_in_capture(Event& event, Stream& stream);
// True if the wait has become a part of a capture.
bool wait_in_capture(Stream& stream, const Event& event);
// Refuses what the host may not ask or do with this stream or event, and makes the capture invalid.
void refuse_if_captured(const Event& event);
void refuse_if_captured(Stream& stream);
// The same for calls that CUDA forbids while anybody captures, by the modes of the captures and of the calling thread.
void refuse_while_capturing();
// For a wait for all streams of a device: no thread may make it while one of them captures, in any mode.
void refuse_while_capturing(int device);
// For work of the legacy stream, which would wait for streams that block.
void refuse_legacy_work(const Stream& stream);
void exchange_mode(cudaStreamCaptureMode& mode); // of the calling thread

} // namespace standin
