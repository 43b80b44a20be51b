// The names of the sockets by which meetings are reached. See hub.cpp and far.cpp.
#pragma once

#include <string>

namespace nccl {

std::string name_here(); // of this process's socket
std::string name_in(const std::string& key);

} // namespace nccl
