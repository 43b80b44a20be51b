#include "devices.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <mutex>

#include "clocks.h"
#include "limits.h"
#include "memory.h"

namespace simulated {
namespace {

std::atomic<c10::DeviceIndex> count{0};
// Every thread starts on the default streams.
thread_local std::array<c10::StreamId, kCeiling> current_streams{};

// torch's generator of a simulated device draws from a generator of the CPU, so that the same seed gives the same
// numbers on every device and on the CPU.
class SimulatedGenerator final : public c10::GeneratorImpl {
 public:
  SimulatedGenerator(c10::DeviceIndex device, at::Generator source)
      : c10::GeneratorImpl(c10::Device(c10::kPrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        source_(std::move(source)) {}
  void set_current_seed(uint64_t seed) override {
    const auto lock = locked();
    source_.set_current_seed(seed);
  }
  // torch asks every generator that is not the CPU's when it is copied.
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset == 0, "generators of simulated devices have no offset; got ", offset);
  }
  uint64_t get_offset() const override {
    return 0;
  }
  uint64_t current_seed() const override {
    const auto lock = locked();
    return source_.current_seed();
  }
  uint64_t seed() override {
    const auto lock = locked();
    return source_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    const auto lock = locked();
    source_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const auto lock = locked();
    return source_.unsafeGetGeneratorImpl()->get_state();
  }
  const at::Generator& source() const {
    return source_;
  }

 private:
  SimulatedGenerator* clone_impl() const override {
    const auto lock = locked();
    return new SimulatedGenerator(device().index(), source_.clone());
  }
  // Kernels draw under the mutex of the source; torch holds the one of this generator only.
  std::unique_lock<std::mutex> locked() const {
    return std::unique_lock<std::mutex>(source_.mutex());
  }
  mutable at::Generator source_;
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<SimulatedGenerator>(device, at::detail::createCPUGenerator());
}

Event* event_of(void* event) {
  return static_cast<Event*>(event);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return c10::kPrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = current_device();
    set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override {
    return current_device();
  }
  void setDevice(c10::Device device) const override {
    set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    go_back_to(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return count;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kPrivateUse1, checked(device.index())));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::array<std::atomic<uint32_t>, kCeiling> made{};
    const auto index = checked(device.index());
    const auto number = made.at(static_cast<size_t>(index))++;
    const auto id = static_cast<c10::StreamId>(1 + number % (kStreams - 1));
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, index), id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device());
    current_streams.at(static_cast<size_t>(stream.device_index())) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }

  // Nothing is ever pending, so queries say yes, and what they say the asking thread knows.
  bool queryStream(const c10::Stream& stream) const override {
    clocks::host_waits(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    clocks::host_waits(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    clocks::host_waits_for_device(checked(device));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of sim:", static_cast<int>(device),
                " cannot be recorded on a stream of sim:", static_cast<int>(stream.device_index()));
    const OnDeviceOfEvent on(stream.device_index());
    if (!*event) {
      *event = new Event();
    }
    clocks::record(*event_of(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && event_of(event)->recorded) {
      const OnDeviceOfEvent on(stream.device_index());
      clocks::wait(stream, *event_of(event));
    }
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event && event_of(event)->recorded) {
      clocks::host_waits(*event_of(event));
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    if (!event) {
      return;
    }
    const OnDeviceOfEvent on(device);
    delete event_of(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end && event_of(start)->recorded && event_of(end)->recorded,
                "Both events must be recorded before calculating elapsed time.");
    return static_cast<double>(event_of(end)->nanoseconds - event_of(start)->nanoseconds) / 1e6;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory::device_allocator()->recordStream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return count > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device >= 0 && device < count;
  }
  c10::DeviceIndex deviceCount() const override {
    return count;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device().index();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    go_back_to(device);
    return before;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(checked(device));
  }
  at::Device getDeviceFromPtr(void*) const override {
    TORCH_CHECK(false, "memory of simulated devices is host memory: a pointer does not tell its device");
  }
  bool isPinnedPtr(const void* data) const override {
    return memory::pinned_block_of(data) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return memory::pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    if (bytes > impl->nbytes()) {
      memory::grow(*impl, bytes);
    } else if (bytes < impl->nbytes()) {
      memory::move(*impl, bytes);
    }
  }
};

} // namespace

c10::DeviceIndex device_count() {
  return count;
}

void set_device_count(c10::DeviceIndex new_count) {
  count = new_count;
}

c10::Stream current_stream(c10::Device device) {
  const auto index = checked(device.index());
  const auto id = current_streams.at(static_cast<size_t>(index));
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, index), id);
}

c10::Stream stream_here() noexcept {
  const auto device = current_device();
  return c10::Stream(c10::Stream::UNSAFE, device, current_streams[static_cast<size_t>(device.index())]);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::array<at::Generator, kCeiling>();
    for (size_t i = 0; i < kCeiling; ++i) {
      (*made)[i] = new_generator(static_cast<c10::DeviceIndex>(i));
    }
    return made;
  }();
  return generators->at(static_cast<size_t>(checked(device)));
}

at::Generator drawn_from(const at::Generator& generator) {
  auto* simulated = dynamic_cast<SimulatedGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(simulated, "expected a generator of a simulated device; got one of ", generator.device().str());
  return simulated->source();
}

void register_hooks() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(c10::kPrivateUse1, memory::device_allocator());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace simulated
