#include "errors.h"

namespace nccl {
namespace {

thread_local std::string last_text;
thread_local ncclResult_t last_result = ncclSuccess;
thread_local std::string shown;

const char* plain_words(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 0) // torch 2.13 comes with 2.29
    case ncclTimeout:
      return "timeout";
#endif
    default:
      return "unknown result code";
  }
}

} // namespace

ncclResult_t failure(ncclResult_t result, const std::string& text) {
  last_result = result;
  last_text = text;
  return result;
}

const char* last_failure() {
  return last_text.c_str();
}

const char* words_for(ncclResult_t result) {
  if (result == ncclSuccess || result != last_result || last_text.empty()) {
    return plain_words(result);
  }
  shown = std::string(plain_words(result)) + ": " + last_text;
  return shown.c_str();
}

} // namespace nccl
