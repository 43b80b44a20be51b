#include "program.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "command.h"
#include "rewrite.h"

namespace standin {
namespace {

std::mutex mutex;
Tools current;

Tools tools() {
  std::lock_guard<std::mutex> lock(mutex);
  if (current.compiler.empty() || current.shim.empty())
    throw std::runtime_error(
        "the stand-in for NVRTC was not told of a compiler: start it by nogpu.cuda");
  return current;
}

bool begins(const std::string& text, const std::string& with) { return text.compare(0, with.size(), with) == 0; }

// What of NVRTC's options means something to a compiler for the host. Others say how to write code for GPUs.
std::vector<std::string> host_options(const std::vector<std::string>& options) {
  std::vector<std::string> kept;
  std::string standard = "17"; // the shim needs it
  for (size_t at = 0; at < options.size(); ++at) {
    const std::string& option = options[at];
    const auto with_value = [&](const std::string& flag, const std::string& name) {
      if (option == flag || option == name) {
        if (at + 1 < options.size()) kept.push_back(flag + options[++at]);
      } else if (begins(option, name + "=")) {
        kept.push_back(flag + option.substr(name.size() + 1));
      } else if (begins(option, flag)) {
        kept.push_back(option);
      } else {
        return false;
      }
      return true;
    };
    if (begins(option, "--std=c++") || begins(option, "-std=c++")) {
      standard = std::max(standard, option.substr(option.find("c++") + 3), [](const auto& one, const auto& other) {
        const auto year = [](const std::string& text) { return text < "50" ? text : "00"; }; // "98", "03", "11", ...
        return year(one) < year(other);
      });
    } else if (option == "-include" || option == "--pre-include") {
      if (at + 1 < options.size()) kept.insert(kept.end(), {"-include", options[++at]});
    } else if (begins(option, "--pre-include=")) {
      kept.insert(kept.end(), {"-include", option.substr(14)});
    } else {
      (void)(with_value("-I", "--include-path") || with_value("-D", "--define-macro") ||
             with_value("-U", "--undefine-macro"));
    }
  }
  kept.push_back("-std=c++" + standard);
  return kept;
}

// The compiler, then these words.
std::vector<std::string> command(const Tools& tools, std::initializer_list<std::vector<std::string>> parts) {
  std::vector<std::string> words = tools.compiler;
  for (const auto& part : parts) words.insert(words.end(), part.begin(), part.end());
  return words;
}

std::string explained(const std::string& source, const std::string& log) {
  std::string text = "The stand-in for NVRTC compiles kernels with the host's C++ compiler, without __CUDA_ARCH__.\n";
  if (source.find("asm") != std::string::npos)
    text += "Inline PTX cannot run on the host: the source needs a branch without __CUDA_ARCH__.\n";
  return text + log;
}

std::string shown_name(const std::string& name) {
  return std::filesystem::path(name.empty() ? "default_program" : name).filename().string();
}

} // namespace

void set_tools(Tools tools) {
  std::lock_guard<std::mutex> lock(mutex);
  current = std::move(tools);
}

std::string tools_version() {
  const Tools found = tools();
  static std::mutex once;
  static std::string version;
  std::lock_guard<std::mutex> lock(once);
  if (!version.empty()) return version;
  const Finished asked = run_command(command(found, {{"--version"}}));
  std::string shim;
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(found.shim)) {
    if (entry.is_regular_file()) files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) shim += read_file(file);
  const std::string compiler = asked.output.substr(0, asked.output.find('\n'));
  version = compiler + ", shim " + std::to_string(std::hash<std::string>()(shim));
  return version;
}

bool Program::compile(const std::vector<std::string>& options) {
  log.clear();
  object.clear();
  empty = source.find_first_not_of(" \t\r\n") == std::string::npos && expressions.empty();
  if (empty) return true;
  try {
    const Tools found = tools();
    const Folder folder;
    for (const auto& [header, content] : headers) folder.write("headers/" + header, content);
    const std::string first =
        folder.write("source.cpp", "#include \"kernel.h\"\n#line 1 \"" + shown_name(name) + "\"\n" + source + "\n");
    std::vector<std::string> includes = {"-I" + folder.path("headers"), "-I" + found.shim};
    for (const std::string& include : found.includes) includes.push_back("-isystem" + include);
    const std::vector<std::string> wanted = host_options(options);
    const std::string last = wanted.back(); // the standard
    const auto step = [&](std::initializer_list<std::vector<std::string>> parts) {
      const Finished done = run_command(command(found, parts));
      if (done.status != 0) log = explained(source, done.output);
      return done.status == 0;
    };
    if (!step({wanted, includes, {"-E", first, "-o", folder.path("read.ii")}})) return false;
    const Rewritten rewritten = rewrite(read_file(folder.path("read.ii")), expressions);
    const std::string second = folder.write("rewritten.ii", rewritten.source);
    // No contraction: the host shall round where the source says so. Kernels read the bits of other types.
    std::vector<std::string> code = {last, "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off"};
    // GCC would share variables of inline functions and templates between all modules of the process.
    if (tools_version().find("clang") == std::string::npos) code.push_back("-fno-gnu-unique");
    if (!step({code, {"-fsanitize=thread", "-c", second, "-o", folder.path("kernels.o")}})) return false;
    if (!step({code, {"-shared", "-Wl,-Bsymbolic", folder.path("kernels.o"), found.shim + "/callbacks.cpp", "-o",
                      folder.path("kernels.so")}}))
      return false;
    object = read_file(folder.path("kernels.so"));
    return true;
  } catch (const std::exception& error) {
    log = explained(source, error.what());
    return false;
  }
}

} // namespace standin
