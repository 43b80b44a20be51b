#include "messages.h"

namespace nccl {

Message message(Message::Kind kind, const std::string& key, int rank, uint64_t number) {
  Message result;
  result.head.kind = kind;
  result.head.rank = rank;
  result.head.number = number;
  result.key = key;
  return result;
}

std::string packed(const Matched& collective) {
  std::string body = bytes_of(collective.number) + bytes_of(static_cast<uint64_t>(collective.launches.size()));
  for (const auto& each : collective.launches) {
    body += bytes_of(each.first) + bytes_of(each.second);
  }
  return body + collective.text;
}

Matched unpacked(const std::string& key, const std::string& body) {
  const auto word = [&](size_t i) { return plain_of<uint64_t>(body.substr(i * sizeof(uint64_t), sizeof(uint64_t))); };
  Matched result;
  result.meeting = key;
  result.number = word(0);
  for (size_t i = 0; i < word(1); ++i) {
    result.launches.emplace_back(word(2 + 2 * i), word(3 + 2 * i));
  }
  result.text = body.substr((2 + 2 * result.launches.size()) * sizeof(uint64_t));
  return result;
}

} // namespace nccl
