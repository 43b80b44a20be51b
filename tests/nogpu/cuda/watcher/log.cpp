// A watcher that writes down what the stand-in for CUDA's runtime tells it, for tests. It answers queries of events with
// what it is told to, and refuses launches on wish.
#include <mutex>
#include <sstream>
#include <string>

#include "runtime.h"

namespace {

std::string text_of(standin::StreamName stream) {
  return std::to_string(stream.device) + "/" + std::to_string(stream.number);
}

struct Log : standin::Watcher {
  std::mutex lock;
  std::ostringstream lines;
  bool done = true; // what queries are answered
  std::string wrong; // what launches are answered

  void write(const std::string& line) {
    const std::lock_guard<std::mutex> guard(lock);
    lines << line << '\n';
  }

  std::string launch(standin::StreamName stream, const char* name, const standin::Part* parts, size_t count,
                     const standin::CopyInfo* copy) override {
    std::string line = std::string(name) + " on " + text_of(stream);
    for (size_t i = 0; i < count; ++i) {
      line += std::string(parts[i].writes ? " writes " : " reads ") + parts[i].argument + " of " +
          std::to_string(parts[i].memory->device) + " [" + std::to_string(parts[i].begin) + ", " +
          std::to_string(parts[i].end) + ")";
    }
    if (copy != nullptr) {
      line += " copies " + std::to_string(copy->bytes) + " from " + std::to_string(copy->from) + " to " +
          std::to_string(copy->to);
    }
    write(line);
    return wrong;
  }
  void recorded(standin::EventState& event, standin::StreamName stream) override {
    event.watched = this;
    write("recorded on " + text_of(stream));
  }
  void stream_waits(standin::StreamName stream, const standin::EventState& event) override {
    write(text_of(stream) + " waits for event of " + text_of(event.stream));
  }
  void stream_waits_for_stream(standin::StreamName later, standin::StreamName earlier) override {
    write(text_of(later) + " waits for " + text_of(earlier));
  }
  void host_waited(const standin::EventState& event, const char* call) override {
    write(std::string(call) + " waits for event of " + text_of(event.stream));
  }
  void host_waited_for_stream(standin::StreamName stream, const char* call) override {
    write(std::string(call) + " waits for " + text_of(stream));
  }
  void host_waited_for_device(int device, const char* call) override {
    write(std::string(call) + " waits for device " + std::to_string(device));
  }
  bool host_asks(const standin::EventState& event) override {
    write("asks for event of " + text_of(event.stream));
    return done;
  }
  bool host_asks_stream(standin::StreamName stream) override {
    write("asks for " + text_of(stream));
    return done;
  }
  void host_function(standin::StreamName stream, bool begins) override {
    write(std::string("host function ") + (begins ? "begins on " : "ends on ") + text_of(stream));
  }
  void forget(standin::EventState& event) override {
    write(event.watched == this ? "forgets an event" : "forgets an event that it did not know");
    event.watched = nullptr;
  }
  void allocated(standin::Memory& memory) override {
    write("allocated " + std::to_string(memory.bytes) + " of " + std::to_string(memory.device));
  }
  void freed(standin::Memory& memory) override {
    write("freed " + std::to_string(memory.bytes) + " of " + std::to_string(memory.device));
  }
};

Log& the_log() {
  static auto& log = *new Log;
  return log;
}

void doubles(standin::StreamName stream, void** arguments, const unsigned* grid, const unsigned* block, size_t shared) {
  the_log().write("kernel on " + text_of(stream) + " of " + std::to_string(grid[0]) + " x " + std::to_string(block[0]) +
                  " with " + std::to_string(shared));
  **static_cast<int**>(arguments[0]) *= 2;
}

} // namespace

extern "C" {

void log_begin() {
  standin::watch(&the_log());
}

// The lines since the last call.
const char* log_lines() {
  static std::string text;
  const std::lock_guard<std::mutex> guard(the_log().lock);
  text = the_log().lines.str();
  the_log().lines.str("");
  return text.c_str();
}

void log_answer(int done) {
  the_log().done = done != 0;
}

void log_refuse(const char* text) {
  the_log().wrong = text;
}

void log_add_kernel(const char* name) {
  standin::add_kernel(name, doubles);
}

// What a kernel that reads these bytes does wrong on the device, or an empty text.
const char* log_check_access(int device, const void* address, size_t bytes) {
  static std::string text;
  const auto part = standin::part_of(address, bytes, false, "input");
  text = standin::check_access(device, "doubles", &part, 1);
  return text.c_str();
}

} // extern "C"
