// Host waits, while somebody keeps them: the line of Python that has made each.
#pragma once

#include <string>
#include <vector>

namespace simulated::waits {

struct Wait {
  std::string call; // of CUDA, or the operator
  std::string file; // empty where no Python runs, or where it must not be asked
  int line = 0;
  std::string function;
};

// Frames of files in these folders are passed over: torch's, and those of testing tools.
void pass_over(std::vector<std::string> folders);
// While at least one caller keeps lines, each wait is noted. The calls have to be balanced.
void keep_lines(bool on);
// The calling thread waits. With `may_ask`, it holds no lock that a thread with the interpreter lock could wait for.
void noted(const char* call, bool may_ask);
// The waits that were noted, from this number on. They are forgotten when the last caller has left.
std::vector<Wait> read(size_t from);
size_t size();

} // namespace simulated::waits
