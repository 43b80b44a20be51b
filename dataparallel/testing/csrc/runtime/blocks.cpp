// Threads of a block that wait for each other need a stack each. A thread gets its stack (a `Fiber`) only when it has to
// wait: until then one fiber runs thread after thread, so a kernel without barriers is a loop. A host thread runs all.
#include "blocks.h"

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

class Stack {
 public:
  Stack() {
    memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("the host has no memory for the stacks of a block's threads");
  }
  ~Stack() { munmap(memory, kStackBytes); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  void* memory;
};

struct Fiber {
  Stack stack;
  ucontext_t context;
};

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
        slots_((threads_.size() + kLanes - 1) / kLanes * kLanes) {
    touched_.add_own(slots_.data(), slots_.size() * sizeof(Slot));
  }

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
    Thread& thread = threads_[current_];
    thread.state = state;
    thread.mask = mask;
    thread.fiber = on_;
    swapcontext(&on_->context, &main_);
  }
  void* slot(unsigned lane) { return &slots_[current_ / kLanes * kLanes + lane % kLanes]; }
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
    swapcontext(&on_->context, &main_);
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
      fibers_.push_back(std::make_unique<Fiber>());
      idle_.push_back(fibers_.back().get());
      touched_.add_own(idle_.back()->stack.memory, kStackBytes);
    }
    Fiber* fiber = idle_.back();
    idle_.pop_back();
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.memory;
    fiber->context.uc_stack.ss_size = kStackBytes;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, &Block::work, 0);
    enter(fiber);
  }

  void resume(size_t at) {
    set_current(at);
    enter(threads_[at].fiber);
  }

  void enter(Fiber* fiber) {
    on_ = fiber;
    swapcontext(&main_, &fiber->context);
  }

  static void work() {
    Block& block = *running;
    // A thread that has waited comes back here when it ends; its fiber may have begun others meanwhile or not.
    while (block.next_ < block.threads_.size()) {
      block.set_current(block.next_++);
      block.entry_.run(block.arguments_);
      block.threads_[block.current_].state = State::kDone;
      ++block.done_;
    }
    Fiber* fiber = block.on_;
    block.idle_.push_back(fiber);
    swapcontext(&fiber->context, &block.main_);
  }

  // Makes threads ready whose wait is over. False if there is none.
  bool release() {
    bool all = true, found = false;
    for (const Thread& thread : threads_) all = all && (thread.state == State::kInBlock || thread.state == State::kDone);
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
  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  ucontext_t main_;
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

std::string run_blocks(const Module& module, const Entry& entry, void** arguments, const Shape& shape, Touched& touched) {
  std::vector<unsigned char> shared(shape.shared_bytes + 16);
  touched.add_own(shared.data(), shared.size());
  touched.add_own(&engine, sizeof engine); // the shim reads it
  *module.engine = &engine;
  *module.shared = reinterpret_cast<void*>((reinterpret_cast<size_t>(shared.data()) + 15) & ~size_t{15});
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
