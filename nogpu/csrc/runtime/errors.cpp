// Errors: names and texts in CUDA's words, the last error of a thread, and texts of the stand-in's own for
// cudaErrorUnknown.
#include <algorithm>

#include "error_words.h"
#include "state.h"

namespace standin {

namespace {

const ErrorWords* words_of(int error) {
  for (const auto& words : kErrors) {
    if (words.number == error) {
      return &words;
    }
  }
  return nullptr;
}

std::mutex untold_lock;
std::vector<std::string>& untold = *new std::vector<std::string>;
constexpr size_t kUntold = 100; // one is as good as many

} // namespace

void keep_untold(const std::string& message) {
  const std::lock_guard<std::mutex> guard(untold_lock);
  if (untold.size() < kUntold) {
    untold.push_back(message);
  }
}

void has_told(const std::string& message) {
  const std::lock_guard<std::mutex> guard(untold_lock);
  const auto found = std::find(untold.begin(), untold.end(), message);
  if (found != untold.end()) {
    untold.erase(found);
  }
}

std::vector<std::string> take_untold() {
  const std::lock_guard<std::mutex> guard(untold_lock);
  return std::exchange(untold, {});
}

int fail(const std::string& text) {
  this_thread().text = text;
  return cudaErrorUnknown;
}

cudaError_t failed(const std::string& text) {
  return static_cast<cudaError_t>(fail(text));
}

const char* error_name(int error) {
  const auto* words = words_of(error);
  return words ? words->driver_name : nullptr;
}

const char* error_text(int error) {
  const auto* words = words_of(error);
  return words ? words->text : nullptr;
}

} // namespace standin

using namespace standin;

cudaError_t cudaGetLastError() {
  auto& last = this_thread().last;
  return std::exchange(last, cudaSuccess);
}

cudaError_t cudaPeekAtLastError() {
  return this_thread().last;
}

const char* cudaGetErrorName(cudaError_t error) {
  const auto* words = words_of(error);
  return words ? words->name : "unrecognized error code";
}

// The text of cudaErrorUnknown is the thread's own: what the stand-in has found.
const char* cudaGetErrorString(cudaError_t error) {
  const auto& own = this_thread().text;
  if (error == cudaErrorUnknown && !own.empty()) {
    has_told(own);
    return own.c_str();
  }
  const auto* text = error_text(error);
  return text ? text : "unrecognized error code";
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error_name(error);
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  const auto& own = this_thread().text;
  has_told(own);
  *text = error == CUDA_ERROR_UNKNOWN && !own.empty() ? own.c_str() : error_text(error);
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
