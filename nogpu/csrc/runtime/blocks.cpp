// Threads of a block that wait for each other need a stack each. A thread gets its stack (a `Fiber`) only when it has
// to wait: until then one fiber runs thread after thread, so a kernel without barriers is a loop. A host thread runs
// all.
#undef _FORTIFY_SOURCE // its longjmp refuses to leave a stack for another
#include "blocks.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

namespace standin {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr unsigned kLanes = 32;

// Whole pages of zeros, which are the kernel's own.
class Pages {
 public:
  Pages(size_t bytes, Touched& touched) : bytes_((bytes + 4095) / 4096 * 4096 + 4096) {
    memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("the host has no memory for the stacks of a block's threads");
    touched.add_own(memory, bytes_);
  }
  ~Pages() { munmap(memory, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  void* memory;

 private:
  const size_t bytes_;
};

struct Fiber {
  explicit Fiber(Touched& touched) : stack(kStackBytes, touched) {}
  Pages stack;
  bool begun = false;
  jmp_buf place; // where it goes on, once it has begun
};

// Leaves a stack for another, whose place was kept by such a switch. swapcontext would call the kernel for signals.
__attribute__((noinline)) void switch_stacks(jmp_buf from, jmp_buf to) {
  if (_setjmp(from) == 0) _longjmp(to, 1);
}

// As `switch_stacks`, for a fiber's first time.
__attribute__((noinline)) void begin_stack(jmp_buf from, const ucontext_t* context) {
  if (_setjmp(from) == 0) setcontext(context);
}

enum class State { kNew, kReady, kInBlock, kInWarp, kDone };

struct Thread {
  State state = State::kNew;
  unsigned mask = 0; // of the lanes that it waits for
  Fiber* fiber = nullptr; // while it waits
};

struct Slot {
  alignas(16) unsigned char bytes[32];
};

class Block;
Block* running = nullptr; // guarded by the lock of run_blocks' caller

class Block {
 public:
  Block(const Module& module, const Entry& entry, void** arguments, const Shape& shape, Touched& touched)
      : module_(module), entry_(entry), arguments_(arguments), shape_(shape), touched_(touched),
        threads_(size_t{shape.block.x} * shape.block.y * shape.block.z),
        slots_((threads_.size() + kLanes) * sizeof(Slot), touched) {}

  // Runs all threads of one block.
  void run(Triple place) {
    place_ = place;
    next_ = done_ = 0;
    for (Thread& thread : threads_) thread = {};
    while (done_ < threads_.size() && problem_.empty()) {
      if (next_ < threads_.size()) start();
      else if (!release()) problem_ = "threads of a block wait for others that have ended or wait at another place";
      for (size_t at = 0; at < next_ && problem_.empty(); ++at) {
        if (threads_[at].state == State::kReady) resume(at);
      }
    }
  }

  const std::string& problem() const { return problem_; }

  // ---- called by the running thread

  void wait(State state, unsigned mask) {
    if (state == State::kInWarp && (mask >> current_ % kLanes & 1u) == 0)
      stop("a thread waits for lanes of its warp with a mask in which it is not itself");
    Thread& thread = threads_[current_];
    thread.state = state;
    thread.mask = mask;
    thread.fiber = on_;
    switch_stacks(on_->place, main_);
  }
  void* slot(unsigned lane) { return static_cast<Slot*>(slots_.memory) + current_ / kLanes * kLanes + lane % kLanes; }
  unsigned lanes() const {
    unsigned found = 0;
    const size_t first = current_ / kLanes * kLanes;
    for (size_t lane = 0; lane < kLanes && first + lane < threads_.size(); ++lane) {
      if (threads_[first + lane].state != State::kDone) found |= 1u << lane;
    }
    return found;
  }
  void touch(const void* address, size_t bytes, bool writes) {
    if (const char* problem = touched_.touch(address, bytes, writes)) stop(problem);
  }
  // The fiber is never resumed. Kernels hold nothing that would have to be given back.
  void stop(const char* why) {
    problem_ = why;
    switch_stacks(on_->place, main_);
  }

 private:
  void set_current(size_t at) {
    current_ = at;
    const unsigned x = shape_.block.x, y = shape_.block.y;
    *module_.thread = {static_cast<unsigned>(at % x), static_cast<unsigned>(at / x % y),
                       static_cast<unsigned>(at / x / y)};
    *module_.block = place_;
  }

  // Runs threads that have not begun, one after the other, until one waits or all have begun.
  void start() {
    if (idle_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>(touched_));
      idle_.push_back(fibers_.back().get());
    }
    Fiber* fiber = idle_.back();
    idle_.pop_back();
    enter(fiber);
  }

  void resume(size_t at) {
    set_current(at);
    enter(threads_[at].fiber);
  }

  void enter(Fiber* fiber) {
    on_ = fiber;
    if (fiber->begun) return switch_stacks(main_, fiber->place);
    fiber->begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber->stack.memory;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, &Block::work, 0);
    begin_stack(main_, &context);
  }

  // What a fiber does: it begins threads as long as there are some, and waits to be started again. A thread that has
  // waited comes back here when it ends.
  static void work() {
    Block& block = *running;
    for (;;) {
      while (block.next_ < block.threads_.size()) {
        block.set_current(block.next_++);
        block.entry_.run(block.arguments_);
        block.threads_[block.current_].state = State::kDone;
        ++block.done_;
      }
      Fiber* fiber = block.on_;
      block.idle_.push_back(fiber);
      switch_stacks(fiber->place, block.main_);
    }
  }

  // Makes threads ready whose wait is over. False if there is none.
  bool release() {
    bool all = true, found = false;
    for (const Thread& thread : threads_)
      all = all && (thread.state == State::kInBlock || thread.state == State::kDone);
    for (size_t first = 0; first < threads_.size(); first += kLanes) found = release_warp(first) || found;
    if (all) {
      for (Thread& thread : threads_) {
        if (thread.state == State::kInBlock) thread.state = State::kReady, found = true;
      }
    }
    return found;
  }

  bool release_warp(size_t first) {
    unsigned waiting = 0, alive = 0;
    const size_t count = std::min<size_t>(kLanes, threads_.size() - first);
    for (size_t lane = 0; lane < count; ++lane) {
      const State state = threads_[first + lane].state;
      waiting |= unsigned{state == State::kInWarp} << lane;
      alive |= unsigned{state != State::kDone} << lane;
    }
    bool found = false;
    for (size_t lane = 0; lane < count; ++lane) {
      const Thread& thread = threads_[first + lane];
      if (thread.state != State::kInWarp || (thread.mask & alive & ~waiting) != 0) continue;
      const unsigned together = thread.mask & alive;
      for (size_t other = 0; other < count; ++other) {
        if (together >> other & 1u) threads_[first + other].state = State::kReady;
      }
      waiting &= ~together;
      found = true;
    }
    return found;
  }

  const Module& module_;
  const Entry& entry_;
  void** const arguments_;
  const Shape& shape_;
  Touched& touched_;
  std::vector<Thread> threads_;
  Pages slots_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  jmp_buf main_; // the stack of run_blocks' caller
  Fiber* on_ = nullptr; // the one that runs
  size_t current_ = 0, next_ = 0, done_ = 0;
  Triple place_{};
  std::string problem_;
};

const Engine engine = {
    [] { running->wait(State::kInBlock, 0); },
    [](unsigned mask) { running->wait(State::kInWarp, mask); },
    [](unsigned lane) { return running->slot(lane); },
    [] { return running->lanes(); },
    [](const void* address, size_t bytes, bool writes) { running->touch(address, bytes, writes); },
    [](const char* why) { running->stop(why); },
};

} // namespace

std::string run_blocks(const Module& module, const Entry& entry, void** arguments, const Shape& shape,
                       Touched& touched) {
  const Pages shared(shape.shared_bytes, touched);
  // The shim reads the engine. Only whole pages are found fast, and the library's own hold no memory of CUDA's.
  const auto page = reinterpret_cast<uintptr_t>(&engine) & ~uintptr_t{4095};
  touched.add_own(reinterpret_cast<const void*>(page), 2 * 4096);
  *module.engine = &engine;
  *module.shared = shared.memory;
  *module.block_size = shape.block;
  *module.grid_size = shape.grid;
  Block block(module, entry, arguments, shape, touched);
  running = &block;
  for (unsigned z = 0; z < shape.grid.z; ++z) {
    for (unsigned y = 0; y < shape.grid.y; ++y) {
      for (unsigned x = 0; x < shape.grid.x && block.problem().empty(); ++x) block.run({x, y, z});
    }
  }
  running = nullptr;
  return block.problem();
}

} // namespace standin
