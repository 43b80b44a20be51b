// The texts of errors. NCCL has two functions for them, and torch shows either, so both say what was wrong.
#pragma once

#include <string>

#include "declarations.h"

namespace nccl {

// Keeps the text for the calling thread, and returns the result.
ncclResult_t failure(ncclResult_t result, const std::string& text);
const char* last_failure();
// NCCL's words for the result, with the thread's last text if that was for the same result.
const char* words_for(ncclResult_t result);

} // namespace nccl
