// Runs another program and keeps what it prints; folders that go when they are no longer needed. Only program.cpp uses
// it.
#pragma once

#include <string>
#include <vector>

namespace standin {

struct Finished {
  int status = 0; // the exit status; -1 if it could not be started
  std::string output; // of both streams
};

Finished run_command(const std::vector<std::string>& words);

// An empty folder of its own, removed with its files by the destructor.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  // Writes a file, whose name may have folders in it, and returns its path.
  std::string write(const std::string& name, const std::string& content) const;
  std::string path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

std::string read_file(const std::string& path);

} // namespace standin
