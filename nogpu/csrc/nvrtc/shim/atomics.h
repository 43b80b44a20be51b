// Atomic functions of device code, as atomic operations of the host: a kernel may share memory with host threads. Only
// kernel.h includes it.
//
// The accesses are announced by hand, because the compiler's instrumentation would replace the operations themselves.
#pragma once

#define STANDIN_PLAIN __attribute__((no_sanitize("thread"))) inline

namespace standin {

template <typename Value>
struct Itself {
  typedef Value Type;
};

inline void touch(const void* address, size_t bytes) { engine->touch(address, bytes, true); }

// Replaces the value by change(value) and returns the one before. Compares bits, so that it works for NaNs.
template <typename Value, typename Change>
STANDIN_PLAIN Value replace(Value* address, Change change) {
  typedef std::conditional_t<
      sizeof(Value) == 8, unsigned long long,
      std::conditional_t<sizeof(Value) == 4, unsigned, std::conditional_t<sizeof(Value) == 2, unsigned short, void>>>
      Bits;
  static_assert(!std::is_void<Bits>::value, "the stand-in has atomic functions of 2, 4 and 8 bytes");
  touch(address, sizeof(Value));
  Bits before = __atomic_load_n(reinterpret_cast<Bits*>(address), __ATOMIC_RELAXED);
  for (;;) {
    Value old;
    __builtin_memcpy(&old, &before, sizeof old);
    const Value changed = change(old);
    Bits after;
    __builtin_memcpy(&after, &changed, sizeof after);
    if (__atomic_compare_exchange_n(reinterpret_cast<Bits*>(address), &before, after, false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST))
      return old;
  }
}

} // namespace standin

// The second argument takes no part in the choice of the type, as in CUDA's own overloads.
#define STANDIN_ATOMIC(name, result)                                                       \
  template <typename Value, std::enable_if_t<std::is_arithmetic<Value>::value, int> = 0>   \
  STANDIN_PLAIN Value name(Value* address, typename standin::Itself<Value>::Type value) {  \
    return standin::replace(address, [value](Value old) -> Value { return result; });      \
  }

STANDIN_ATOMIC(atomicAdd, old + value)
STANDIN_ATOMIC(atomicSub, old - value)
STANDIN_ATOMIC(atomicExch, (void(old), value))
STANDIN_ATOMIC(atomicMin, value < old ? value : old)
STANDIN_ATOMIC(atomicMax, value > old ? value : old)
STANDIN_ATOMIC(atomicAnd, old& value)
STANDIN_ATOMIC(atomicOr, old | value)
STANDIN_ATOMIC(atomicXor, old ^ value)
STANDIN_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
STANDIN_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)

template <typename Value, std::enable_if_t<std::is_arithmetic<Value>::value, int> = 0>
STANDIN_PLAIN Value atomicCAS(Value* address, typename standin::Itself<Value>::Type expected,
                              typename standin::Itself<Value>::Type value) {
  return standin::replace(address, [=](Value old) -> Value { return old == expected ? value : old; });
}

#undef STANDIN_ATOMIC
