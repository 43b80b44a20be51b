#include "allocators.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/ScopeExit.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <map>
#include <mutex>
#include <unordered_map>

#include "../runtime/runtime.h"
#include "front.h"
#include "process_state.h"
#include "stream_name.h"

namespace simulated::allocators {
namespace {

using Trace = c10::CachingDeviceAllocator::TraceEntry;

struct State {
  std::mutex mutex;
  std::unordered_map<size_t, Clock> awaited; // by address: what the events cover that were recorded at its free
  std::map<c10::MempoolId_t, bool> pools; // other than the default one: whether only captures have taken memory of it
};

thread_local size_t being_freed = 0; // an address, until the thread does something else
thread_local bool is_in_host_allocator = false;

c10::Stream home_of(const Trace& entry) {
  return stream_of(name_of(entry.stream_, entry.device_));
}

// True for a pool of which only captures take memory. They use none of it, replays do, so memory may go back there at any
// time: a thread of a backward pass may let go of what a capture has computed when the graph has been replayed already.
bool is_of_captures(c10::MempoolId_t pool) {
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  const auto found = s.pools.find(pool);
  return found != s.pools.end() && found->second;
}

void note_allocation(const Trace& entry) {
  if (entry.mempool_ == c10::MempoolId_t{0, 0}) {
    return;
  }
  const bool is_captured = standin::anybody_captures() && standin::is_capturing(name_of(entry.stream_, entry.device_));
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.pools.emplace(entry.mempool_, true).first->second &= is_captured;
}

Clock take_awaited(size_t address) {
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  const auto found = s.awaited.find(address);
  if (found == s.awaited.end()) {
    return {};
  }
  auto result = std::move(found->second);
  s.awaited.erase(found);
  return result;
}

// The allocator calls this under its own lock, so nothing here may call it or Python.
void look(const Trace& entry) {
  if (entry.action_ == Trace::FREE_REQUESTED) {
    being_freed = entry.addr_;
    return;
  }
  if (entry.action_ != Trace::ALLOC && entry.action_ != Trace::FREE_COMPLETED) {
    return;
  }
  being_freed = 0;
  const auto part = standin::part_of(reinterpret_cast<void*>(entry.addr_), entry.size_, false, "");
  if (!part.memory || !part.memory->watched) {
    return;
  }
  auto& block = *static_cast<Tracked*>(part.memory->watched);
  if (entry.action_ == Trace::ALLOC) {
    note_allocation(entry);
    clocks::taken(block, {part.begin, part.end}, home_of(entry));
    return;
  }
  const auto awaited = take_awaited(entry.addr_);
  if (!is_of_captures(entry.mempool_)) {
    clocks::given_back(block, {part.begin, part.end}, home_of(entry), awaited);
  }
}

// torch.cuda.Event calls the runtime from another library.
bool is_of_allocator(const void* caller) {
  static const void* const library = [] {
    Dl_info info;
    return dladdr(reinterpret_cast<void*>(&c10::cuda::device_count), &info) ? info.dli_fbase : nullptr;
  }();
  Dl_info info;
  return dladdr(caller, &info) && info.dli_fbase == library;
}

// What `call` returns. Meanwhile the calling thread is in the allocator of pinned memory.
template <class Call>
auto inside(Call call) {
  const bool before = std::exchange(is_in_host_allocator, true);
  const auto restore = c10::make_scope_exit([before] { is_in_host_allocator = before; });
  return call();
}

// torch's allocator of pinned memory, which says when it gives memory out.
class PinnedMemory final : public at::HostAllocator {
 public:
  explicit PinnedMemory(at::HostAllocator* torchs) : torchs_(torchs) {}

  at::DataPtr allocate(size_t bytes) override {
    auto result = inside([&] { return torchs_->allocate(bytes); });
    const auto part = standin::part_of(result.get(), bytes, false, "");
    if (part.memory && part.memory->watched) {
      clocks::handed_on(*static_cast<Tracked*>(part.memory->watched), {part.begin, part.end});
    }
    return result;
  }
  at::DeleterFnPtr raw_deleter() const override {
    return torchs_->raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    torchs_->copy_data(to, from, bytes);
  }
  bool record_event(void* pointer, void* context, c10::Stream stream) override {
    return torchs_->record_event(pointer, context, stream);
  }
  void empty_cache() override {
    inside([&] { torchs_->empty_cache(); });
  }
  at::HostStats get_stats() override {
    return torchs_->get_stats();
  }
  void reset_accumulated_stats() override {
    torchs_->reset_accumulated_stats();
  }
  void reset_peak_stats() override {
    torchs_->reset_peak_stats();
  }
  void begin_allocate_to_pool(c10::MempoolId_t pool, std::function<bool(c10::Stream)> filter) override {
    torchs_->begin_allocate_to_pool(pool, std::move(filter));
  }
  void end_allocate_to_pool(c10::MempoolId_t pool) override {
    torchs_->end_allocate_to_pool(pool);
  }
  void release_pool(c10::MempoolId_t pool) override {
    torchs_->release_pool(pool);
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  void record_history(bool enabled, c10::CachingDeviceAllocator::CreateContextFn recorder, size_t most,
                      c10::CachingDeviceAllocator::RecordContext when, bool clear) override {
    torchs_->record_history(enabled, recorder, most, when, clear);
  }
  bool is_history_enabled() const override {
    return torchs_->is_history_enabled();
  }
  std::vector<at::HostSegmentInfo> get_segments() override {
    return torchs_->get_segments();
  }
  std::vector<Trace> get_traces() override {
    return torchs_->get_traces();
  }
  void record_external_register(void* pointer, size_t bytes) override {
    torchs_->record_external_register(pointer, bytes);
  }
  void record_external_unregister(void* pointer) override {
    torchs_->record_external_unregister(pointer);
  }
#endif

 private:
  at::HostAllocator* const torchs_;
};

} // namespace

void watch() {
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&look);
  static auto* const pinned = new PinnedMemory(at::getHostAllocator(c10::kCUDA));
  at::setHostAllocator(c10::kCUDA, pinned, 1);
}

bool has_recorded(const standin::EventState& event, const Clock& clock) {
  if (!being_freed || !is_of_allocator(event.caller)) {
    return false;
  }
  auto& s = process_state<State>();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.awaited[being_freed].join(clock);
  return true;
}

void does_something_else() {
  being_freed = 0;
}

bool are_asking() {
  return is_in_host_allocator;
}

} // namespace simulated::allocators
