// Errors: names and texts in CUDA's words, the last error of a thread, and texts of the stand-in's own for
// cudaErrorUnknown.
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

} // namespace

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
  *text = error == CUDA_ERROR_UNKNOWN && !own.empty() ? own.c_str() : error_text(error);
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
