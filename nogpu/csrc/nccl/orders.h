// Finds collectives that wait for each other in a circle. On a device kernels start in the order of their launches, and
// a collective's kernel ends only after those of the other ranks have started. If one device launches A before B and
// another launches B before A, each may wait for the other for ever, on whatever streams and communicators they are.
// NCCL asks programs to have one order on all devices. Calls of one group have no order between them.
//
// This library computes such calls without harm, as they reach it. So it looks at the order of the launches instead.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace nccl {

// A collective that all its ranks have launched.
struct Matched {
  std::string meeting; // the key of its communicator
  uint64_t number = 0; // of the collective in its meeting
  std::string text; // what it is, in words
  std::vector<std::pair<uint64_t, uint64_t>> launches; // devices with the numbers of the launches
};

struct Circle {
  std::string text;
  std::vector<std::string> meetings;
};

// Each of these is called with the library's lock. `launched` may be told of a collective twice. The circle has no text
// if there is none.
Circle launched(const Matched& collective);
void completed(const std::string& meeting, uint64_t number);
// No later circle goes through the communicator's collectives.
void forget_orders(const std::string& meeting);

} // namespace nccl
