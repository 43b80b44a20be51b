// Makes entries of kernels, for the table that ../rewrite.cpp writes behind a program's source. Only kernel.h includes
// it.
#pragma once

namespace standin {
namespace { // modules of a process may have kernels of one name

template <auto kernel>
struct Caller {
  static_assert(sizeof(kernel) == 0, "the stand-in has name expressions for kernels only, which return void");
};

template <typename... Parameters, void (*kernel)(Parameters...)>
struct Caller<kernel> {
  static constexpr Parameter parameters[] = {
      {sizeof(Parameters), alignof(Parameters), std::is_pointer<Parameters>::value}..., {0, 0, false}};

  template <size_t... index>
  __attribute__((no_sanitize("thread"))) static void call(void** arguments, std::index_sequence<index...>) {
    (void)arguments;
    kernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[index])...);
  }
  // Arguments lie in the host's memory, which the instrumentation would take for the kernel's.
  __attribute__((no_sanitize("thread"))) static void run(void** arguments) {
    call(arguments, std::index_sequence_for<Parameters...>());
  }
  static Entry entry(const char* name, const char* names) {
    return {name, reinterpret_cast<const void*>(kernel), &run, sizeof...(Parameters), parameters, names};
  }
};

} // namespace
} // namespace standin
