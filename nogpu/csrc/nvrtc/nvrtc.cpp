// NVRTC's functions, answered by the host's C++ compiler: libnvrtc.so.13 for torch and CuPy. The program is in
// program.cpp.
//
// The cubin is a shared object, which the stand-in's driver loads and a GPU's would refuse. Lowered names are the name
// expressions themselves. What has no meaning for the host (OptiX, LTO, precompiled headers) answers with an error.
#include <nvrtc.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "program.h"
#include "shim/module.h"

struct _nvrtcProgram {
  standin::Program program;
  bool compiled = false;
  std::string cubin, ptx;
};

namespace {

// The PTX is text: the object in hexadecimal digits after a line that says what it is.
std::string as_text(const standin::Program& program) {
  std::string text = std::string(standin::kTextMark) + "\n// compiled by " + standin::tools_version() + "\n";
  static const char digits[] = "0123456789abcdef";
  for (const char c : program.object) {
    text += digits[static_cast<unsigned char>(c) >> 4];
    text += digits[c & 15];
  }
  return text;
}

nvrtcResult size(const std::string& text, size_t* bytes, size_t more) {
  if (bytes == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  *bytes = text.size() + more;
  return NVRTC_SUCCESS;
}

nvrtcResult copy(const std::string& text, char* to, size_t more) {
  if (to == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  std::memcpy(to, text.c_str(), text.size() + more);
  return NVRTC_SUCCESS;
}

} // namespace

extern "C" {

// Tells where the tools are, as lists of words with a newline after each. Python calls it when it has loaded this
// library.
__attribute__((visibility("default"))) void standin_nvrtc_tools(const char* compiler, const char* shim,
                                                                const char* includes) {
  const auto lines = [](const char* text) {
    std::vector<std::string> words;
    for (const char* end; (end = std::strchr(text, '\n')) != nullptr; text = end + 1) words.emplace_back(text, end);
    return words;
  };
  standin::set_tools({lines(compiler), shim, lines(includes)});
}

const char* nvrtcGetErrorString(nvrtcResult result) {
  switch (result) {
    case NVRTC_SUCCESS: return "NVRTC_SUCCESS";
    case NVRTC_ERROR_INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
    case NVRTC_ERROR_INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
    case NVRTC_ERROR_COMPILATION: return "NVRTC_ERROR_COMPILATION";
    case NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID: return "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID";
    default: return "an error of NVRTC that the stand-in knows no name of";
  }
}

nvrtcResult nvrtcVersion(int* major, int* minor) {
  if (major == nullptr || minor == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  *major = 13;
  *minor = 0;
  return NVRTC_SUCCESS;
}

namespace {
constexpr int kArchitectures[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};
}

nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  if (count == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  *count = static_cast<int>(std::size(kArchitectures));
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetSupportedArchs(int* architectures) {
  if (architectures == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  std::memcpy(architectures, kArchitectures, sizeof kArchitectures);
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCreateProgram(nvrtcProgram* made, const char* source, const char* name, int count,
                               const char* const* headers, const char* const* names) {
  if (made == nullptr || source == nullptr || count < 0) return NVRTC_ERROR_INVALID_INPUT;
  auto program = std::make_unique<_nvrtcProgram>();
  program->program.source = source;
  program->program.name = name == nullptr ? "" : name;
  for (int i = 0; i < count; ++i) program->program.headers.emplace_back(names[i], headers[i]);
  *made = program.release();
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  if (program == nullptr || *program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
  delete *program;
  *program = nullptr;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char* expression) {
  if (program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
  if (expression == nullptr) return NVRTC_ERROR_INVALID_INPUT;
  if (program->compiled) return NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION;
  program->program.expressions.emplace_back(expression);
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* options) {
  if (program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
  if (!program->program.compile({options, options + count})) return NVRTC_ERROR_COMPILATION;
  program->compiled = true;
  program->cubin = program->program.object;
  try {
    program->ptx = as_text(program->program);
  } catch (const std::exception& error) {
    program->program.log = error.what();
    return NVRTC_ERROR_COMPILATION;
  }
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t* bytes) {
  return program == nullptr ? NVRTC_ERROR_INVALID_PROGRAM : size(program->program.log, bytes, 1);
}
nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) {
  return program == nullptr ? NVRTC_ERROR_INVALID_PROGRAM : copy(program->program.log, log, 1);
}
nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t* bytes) {
  return program == nullptr || !program->compiled ? NVRTC_ERROR_INVALID_PROGRAM : size(program->ptx, bytes, 1);
}
nvrtcResult nvrtcGetPTX(nvrtcProgram program, char* ptx) {
  return program == nullptr || !program->compiled ? NVRTC_ERROR_INVALID_PROGRAM : copy(program->ptx, ptx, 1);
}
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t* bytes) {
  return program == nullptr || !program->compiled ? NVRTC_ERROR_INVALID_PROGRAM : size(program->cubin, bytes, 0);
}
nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* cubin) {
  return program == nullptr || !program->compiled ? NVRTC_ERROR_INVALID_PROGRAM : copy(program->cubin, cubin, 0);
}

nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char* expression, const char** lowered) {
  if (program == nullptr || !program->compiled) return NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION;
  for (const std::string& known : program->program.expressions) {
    if (known == expression) {
      const size_t first = known.find_first_not_of(" &:");
      *lowered = known.c_str() + (first == std::string::npos ? 0 : first);
      return NVRTC_SUCCESS;
    }
  }
  return NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID;
}

nvrtcResult nvrtcGetLTOIRSize(nvrtcProgram, size_t*) { return NVRTC_ERROR_INVALID_INPUT; }
nvrtcResult nvrtcGetLTOIR(nvrtcProgram, char*) { return NVRTC_ERROR_INVALID_INPUT; }
nvrtcResult nvrtcGetOptiXIRSize(nvrtcProgram, size_t*) { return NVRTC_ERROR_INVALID_INPUT; }
nvrtcResult nvrtcGetOptiXIR(nvrtcProgram, char*) { return NVRTC_ERROR_INVALID_INPUT; }
nvrtcResult nvrtcGetPCHHeapSize(size_t*) { return NVRTC_ERROR_INVALID_INPUT; }
nvrtcResult nvrtcSetPCHHeapSize(size_t) { return NVRTC_ERROR_INVALID_INPUT; }
nvrtcResult nvrtcGetPCHCreateStatus(nvrtcProgram) { return NVRTC_ERROR_INVALID_INPUT; }
nvrtcResult nvrtcGetPCHHeapSizeRequired(nvrtcProgram, size_t*) { return NVRTC_ERROR_INVALID_INPUT; }
nvrtcResult nvrtcSetFlowCallback(nvrtcProgram, int (*)(void*, void*), void*) { return NVRTC_SUCCESS; }

} // extern "C"
