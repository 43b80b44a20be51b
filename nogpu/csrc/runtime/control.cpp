// runtime.h for programs in Python, which call it by ctypes before torch is imported. Each function returns null, or a
// text that says what is wrong; it is valid until the thread's next call.
#include <sstream>

#include "state.h"

namespace {

template <class Body>
const char* said(const Body& body) {
  static thread_local std::string text;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
  } catch (const standin::Refused& refused) {
    text = cudaGetErrorString(refused.error);
  }
  return text.c_str();
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
    }
    result += c;
  }
  return result + '"';
}

// As JSON.
std::string text_of(const standin::Counts& counts) {
  std::ostringstream text;
  const char* comma = "";
  text << "{\"host_waits\": " << counts.host_waits << ", \"calls\": {";
  for (const auto& [name, calls] : counts.calls) {
    text << std::exchange(comma, ", ") << quoted(name) << ": " << calls;
  }
  text << "}, \"contexts\": [";
  comma = "";
  for (size_t device = 0; device < counts.contexts.size(); ++device) {
    if (counts.contexts[device]) {
      text << std::exchange(comma, ", ") << device;
    }
  }
  text << "], \"kernels\": [";
  comma = "";
  for (const auto& kernel : counts.kernels) {
    text << std::exchange(comma, ", ") << quoted(kernel);
  }
  text << "]}";
  return text.str();
}

} // namespace

extern "C" {

#pragma GCC visibility push(default)

const char* standin_set_machine(int devices, const char* name, int major, int minor, size_t bytes, int processors,
                                int ecc) {
  return said([&] { standin::set_machine({devices, name, major, minor, bytes, processors, ecc != 0}); });
}

// 0: works, 1: missing, 2: broken.
const char* standin_set_link(int from, int to, int link) {
  return said([&] {
    if (link < 0 || link > 2) {
      throw std::invalid_argument("a link is 0 (works), 1 (missing) or 2 (broken); got " + std::to_string(link));
    }
    standin::set_link(from, to, static_cast<standin::Link>(link));
  });
}

const char* standin_set_capacity(int device, size_t bytes) {
  return said([&] { standin::set_capacity(device, bytes); });
}

const char* standin_counts() {
  static thread_local std::string text;
  text = text_of(standin::counts());
  return text.c_str();
}

void standin_forget_counts() {
  standin::forget_counts();
}

#pragma GCC visibility pop

} // extern "C"
