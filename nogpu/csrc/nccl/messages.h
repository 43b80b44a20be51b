// What the two sides of a connection write in their messages. Both run the same library, so plain data is sent as it is.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "orders.h"
#include "wire.h"

namespace nccl {

template <typename T>
std::string bytes_of(const T& plain) {
  return {reinterpret_cast<const char*>(&plain), sizeof(plain)};
}

template <typename T>
T plain_of(const std::string& bytes) {
  T plain;
  std::memcpy(static_cast<void*>(&plain), bytes.data(), std::min(sizeof(plain), bytes.size()));
  return plain;
}

Message message(Message::Kind kind, const std::string& key, int rank, uint64_t number = 0);
std::string packed(const Matched& collective);
Matched unpacked(const std::string& key, const std::string& body);

} // namespace nccl
