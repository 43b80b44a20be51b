// What has to change in a preprocessed program before a host's compiler takes it: shared memory, and a table of kernels
// at its end. It reads text; it compiles nothing. Only program.cpp calls it.
#pragma once

#include <string>
#include <vector>

namespace standin {

struct Rewritten {
  std::string source;
  std::vector<std::string> kernels; // as the table names them
};

// `source` has shim/kernel.h before it and was preprocessed. `expressions` are the name expressions of the program,
// each of which names an instance of a template. Throws std::invalid_argument, with a sentence, for what it cannot
// write.
Rewritten rewrite(const std::string& source, const std::vector<std::string>& expressions);

} // namespace standin
