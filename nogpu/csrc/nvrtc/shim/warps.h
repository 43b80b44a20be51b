// Shuffles and votes of a warp's lanes: each lane leaves its value in a slot, all wait, each reads, all wait again.
// Only kernel.h includes it.
//
// The order of the lanes is that of threads in a block: x is fastest. A mask that names a lane which never comes is an
// error of the launch.
#pragma once

namespace standin {

inline unsigned lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

// Every lane leaves a value; returns what read() makes of the slots.
template <typename Value, typename Read>
inline auto exchange(unsigned mask, Value value, Read read) {
  static_assert(sizeof(Value) <= 32, "the stand-in's warps exchange values of at most 32 bytes");
  __builtin_memcpy(engine->slot_of_lane(lane()), &value, sizeof value);
  engine->wait_for_warp(mask);
  auto result = read();
  engine->wait_for_warp(mask);
  return result;
}

template <typename Value>
inline Value from_slot(unsigned source) {
  Value value;
  __builtin_memcpy(&value, engine->slot_of_lane(source), sizeof value);
  return value;
}

template <typename Value>
inline Value shuffle(unsigned mask, Value value, unsigned source) {
  return exchange(mask, value, [=] { return from_slot<Value>(source); });
}

} // namespace standin

template <typename Value>
inline Value __shfl_sync(unsigned mask, Value value, int source, int width = 32) {
  const unsigned first = standin::lane() / width * width;
  return standin::shuffle(mask, value, first + unsigned(source) % width);
}
template <typename Value>
inline Value __shfl_up_sync(unsigned mask, Value value, unsigned delta, int width = 32) {
  const unsigned here = standin::lane(), first = here / width * width;
  return standin::shuffle(mask, value, here < first + delta ? here : here - delta);
}
template <typename Value>
inline Value __shfl_down_sync(unsigned mask, Value value, unsigned delta, int width = 32) {
  const unsigned here = standin::lane(), end = here / width * width + width;
  return standin::shuffle(mask, value, here + delta < end ? here + delta : here);
}
template <typename Value>
inline Value __shfl_xor_sync(unsigned mask, Value value, int bits, int width = 32) {
  const unsigned here = standin::lane(), other = here ^ unsigned(bits);
  return standin::shuffle(mask, value, other < here / width * width + width ? other : here);
}

inline unsigned __activemask() { return standin::engine->lanes(); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return standin::exchange(mask, predicate, [=] {
    unsigned found = 0;
    for (unsigned other = 0; other < 32; ++other) {
      const bool votes = ((mask & standin::engine->lanes()) >> other & 1u) != 0;
      if (votes && standin::from_slot<int>(other) != 0) found |= 1u << other;
    }
    return found;
  });
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
