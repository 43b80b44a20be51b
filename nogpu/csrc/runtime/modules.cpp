#include "state.h" // first: it exports what runtime.h declares
#include "modules.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>

namespace standin {
namespace {

std::mutex modules_lock; // of the two sets, and of the modules' functions
std::set<void*> known_modules, known_functions;
std::mutex run_lock; // kernels run one at a time
thread_local const std::vector<Part>* described = nullptr;

const char* const kNotOurs =
    "cuModuleLoadData got %s. The stand-in runs only what its own NVRTC has compiled: compile the source at run time "
    "(NVRTC, cupy.RawModule(code=...)), and empty caches of compiled kernels";

[[noreturn]] void refuse(const std::string& what) {
  std::string text = kNotOurs;
  text.replace(text.find("%s"), 2, what);
  throw std::invalid_argument(text);
}

std::string from_text(const char* text) {
  while (*text == '/') { // lines of comments
    text = std::strchr(text, '\n');
    if (text == nullptr) refuse("a text without a module in it");
    ++text;
  }
  std::string bytes;
  const auto value = [](char digit) { return digit <= '9' ? digit - '0' : digit - 'a' + 10; };
  for (; std::isxdigit(static_cast<unsigned char>(text[0])) && text[1] != 0; text += 2)
    bytes += static_cast<char>(value(text[0]) << 4 | value(text[1]));
  return bytes;
}

// The bytes of the shared object. A caller gives no length: the headers say how far it goes.
std::string object_of(const void* image) {
  const auto* text = static_cast<const char*>(image);
  if (std::strncmp(text, kTextMark, sizeof kTextMark - 1) == 0) return from_text(text);
  if (std::memcmp(text, ELFMAG, SELFMAG) != 0) {
    const auto first = static_cast<unsigned char>(*text);
    const bool readable = std::isprint(first) || std::isspace(first);
    refuse(readable ? "PTX" : "a fatbin, or what is no module at all");
  }
  const auto* header = static_cast<const Elf64_Ehdr*>(image);
  if (header->e_type != ET_DYN || (header->e_machine != EM_X86_64 && header->e_machine != EM_AARCH64))
    refuse("a cubin for GPUs");
  size_t end = header->e_shoff + size_t{header->e_shentsize} * header->e_shnum;
  const auto* segments = reinterpret_cast<const Elf64_Phdr*>(text + header->e_phoff);
  for (int i = 0; i < header->e_phnum; ++i) end = std::max<size_t>(end, segments[i].p_offset + segments[i].p_filesz);
  return {text, end};
}

// Every load makes variables of its own, as each context has: the loader takes files of different names for different
// libraries. The file is not needed once it is loaded.
void* open_object(const std::string& object) {
  std::string path = (std::filesystem::temp_directory_path() / "standin-kernels-XXXXXX").string();
  const int file = mkstemp(path.data());
  if (file < 0) throw std::runtime_error("the stand-in cannot make a file for a module of kernels: " + path);
  close(file);
  std::ofstream(path, std::ios::binary) << object;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const std::string why = handle == nullptr ? dlerror() : "";
  unlink(path.c_str());
  if (handle == nullptr) throw std::runtime_error("a module of kernels cannot be loaded: " + why);
  return handle;
}

// "const float* x, int n" has x and n.
std::vector<std::string> names_in(const std::string& parameters, size_t count) {
  std::vector<std::string> names;
  std::string word, last;
  int depth = 0;
  for (const char c : parameters + ",") {
    if (c == '<' || c == '(' || c == '[') ++depth;
    if (c == '>' || c == ')' || c == ']') --depth;
    if (c == ',' && depth == 0) {
      names.push_back(word.empty() ? last : word);
      word.clear();
    } else if (std::isalnum(static_cast<unsigned char>(c)) || c == '_') {
      word += c;
    } else {
      last = word.empty() ? last : word;
      word.clear();
    }
  }
  names.resize(count);
  for (size_t i = 0; i < count; ++i) {
    if (names[i].empty()) names[i] = "argument " + std::to_string(i); // of an instance of a template
  }
  return names;
}

// Which argument leads to a part: the last pointer at or before its begin, in the same allocation.
void name_parts(std::vector<Part>& parts, const LoadedFunction& function, void** arguments) {
  const Entry& entry = *function.entry;
  for (Part& part : parts) {
    part.argument = "memory that no argument points to";
    const char* nearest = nullptr;
    for (size_t i = 0; i < entry.count; ++i) {
      if (!entry.parameters[i].pointer) continue;
      const char* pointer;
      std::memcpy(&pointer, arguments[i], sizeof pointer);
      const char* begin = part.memory->begin;
      if (pointer < begin || pointer > begin + part.begin || (nearest != nullptr && pointer < nearest)) continue;
      nearest = pointer;
      part.argument = function.parameters[i].c_str();
    }
  }
}

} // namespace

LoadedModule* load_module(const void* image, int device) {
  const std::string object = object_of(image);
  auto module = std::make_unique<LoadedModule>();
  module->device = device;
  module->handle = open_object(object);
  module->kernels = static_cast<Module*>(dlsym(module->handle, "standin_module"));
  if (module->kernels == nullptr) refuse("a shared object without kernels");
  if (module->kernels->version != kModuleVersion) refuse("a module of another version of the stand-in");
  const link_map* map = nullptr;
  dlinfo(module->handle, RTLD_DI_LINKMAP, &map);
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(object.data());
  const auto* segments = reinterpret_cast<const Elf64_Phdr*>(object.data() + header->e_phoff);
  for (int i = 0; i < header->e_phnum; ++i) {
    if (segments[i].p_type != PT_LOAD) continue;
    const auto begin = (map->l_addr + segments[i].p_vaddr) & ~size_t{4095};
    const auto end = (map->l_addr + segments[i].p_vaddr + segments[i].p_memsz + 4095) & ~size_t{4095};
    module->segments.emplace_back(reinterpret_cast<const void*>(begin), end - begin);
  }
  std::lock_guard<std::mutex> lock(modules_lock);
  known_modules.insert(module.get());
  return module.release();
}

void unload_module(LoadedModule& module) {
  std::lock_guard<std::mutex> running(run_lock);
  std::lock_guard<std::mutex> lock(modules_lock);
  known_modules.erase(&module); // the object stays: its functions' names may be in the watcher's history
  for (const auto& [name, function] : module.functions) known_functions.erase(function.get());
  dlclose(module.handle);
  module.handle = nullptr;
}

LoadedModule& module_of(void* handle) {
  std::lock_guard<std::mutex> lock(modules_lock);
  if (known_modules.count(handle) == 0) throw Refused{cudaErrorInvalidResourceHandle};
  return *static_cast<LoadedModule*>(handle);
}

LoadedFunction& function_of(void* handle) {
  std::lock_guard<std::mutex> lock(modules_lock);
  if (known_functions.count(handle) == 0) throw Refused{cudaErrorInvalidResourceHandle};
  return *static_cast<LoadedFunction*>(handle);
}

LoadedFunction* find_function(LoadedModule& module, const std::string& name) {
  std::lock_guard<std::mutex> lock(modules_lock);
  auto& function = module.functions[name];
  if (function) return function.get();
  const void* compiled = dlsym(module.handle, name.c_str());
  const Module& kernels = *module.kernels;
  for (const Entry* entry = kernels.entries; entry != kernels.entries + kernels.count; ++entry) {
    if (name == entry->name || compiled == entry->function) {
      function = std::make_unique<LoadedFunction>();
      *function = {&module, entry, name, names_in(entry->names, entry->count)};
      known_functions.insert(function.get());
      return function.get();
    }
  }
  module.functions.erase(name);
  return nullptr;
}

std::pair<void*, size_t> find_variable(LoadedModule& module, const std::string& name) {
  void* address = dlsym(module.handle, name.c_str());
  Dl_info info;
  const Elf64_Sym* symbol = nullptr;
  auto** place = reinterpret_cast<void**>(const_cast<Elf64_Sym**>(&symbol));
  const bool found = address != nullptr && dladdr1(address, &info, place, RTLD_DL_SYMENT) != 0;
  if (!found || symbol == nullptr) return {nullptr, 0};
  return {address, symbol->st_size};
}

void describe_kernels(const std::vector<Part>* parts) {
  described = parts;
}

std::string launch_function(LoadedFunction& function, Stream& stream, const Shape& shape, void** arguments) {
  // What the kernel touches is known after it has run. It must not run before what its stream waits for.
  order(stream);
  auto* told = watcher();
  std::string problem = told == nullptr ? "" : told->begins(stream.name, function.name.c_str());
  if (!problem.empty()) return problem;
  std::vector<Part> parts;
  if (described != nullptr) {
    parts = *described;
  } else {
    std::lock_guard<std::mutex> lock(run_lock);
    static Touched& touched = *new Touched;
    touched.forget();
    for (const auto& [begin, bytes] : function.module->segments) touched.add_own(begin, bytes);
    problem = run_blocks(*function.module->kernels, *function.entry, arguments, shape, touched);
    parts = touched.parts();
    touched.forget();
    name_parts(parts, function, arguments);
  }
  const std::string unmapped = check_access(stream.name.device, function.name.c_str(), parts.data(), parts.size());
  if (!unmapped.empty()) return unmapped;
  const std::string found =
      announce_or_refuse(stream.name, function.name.c_str(), parts.data(), parts.size(), nullptr,
                         described == nullptr ? Turn::kAtOnce : Turn::kLater);
  return problem.empty() ? found : "the kernel " + function.name + " stopped: " + problem;
}

} // namespace standin
