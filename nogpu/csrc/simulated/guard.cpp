// Implements the interface of torch's device guards: devices, streams and events.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>

#include "clocks.h"
#include "current.h"
#include "ceilings.h"
#include "memory.h"

namespace simulated {
namespace {

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
    return device_count();
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
    return exchange_stream(stream);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }

  // Nothing is ever pending, so queries return true. The calling thread then knows as much as after a wait, and has not
  // waited.
  bool queryStream(const c10::Stream& stream) const override {
    clocks::host_asks(stream);
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
    if (event && event_of(event)->recorded) {
      clocks::host_asks(*event_of(event));
    }
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

} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace simulated
