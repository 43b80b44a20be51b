// What torch's CUDA devices provide for ../shared.
#include "front.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>

#include "stream_name.h"
#include "watch.h"

namespace simulated {
namespace {

standin::StreamName name_of_current(c10::Device device) {
  return name_of(c10::cuda::getCurrentCUDAStream(device.index()).stream(), device.index());
}

// A GPU's kernel would have written into this memory at once. The bytes are copied, because only the allocator of torch
// may make memory of a device. An operator that is captured or skipped has no bytes.
c10::DataPtr copied_to(const c10::StorageImpl& made, c10::Device device) {
  const OnDevice on(device);
  auto data = front::allocator()->allocate(made.nbytes());
  if (made.device_type() != c10::kMeta) {
    std::memcpy(data.get(), made.data(), made.nbytes());
  }
  return data;
}

at::PhiloxCudaState next_state(const at::Generator& generator) {
  auto source = generator;
  const std::lock_guard<std::mutex> lock(source.mutex());
  return at::check_generator<at::CUDAGeneratorImpl>(source)->philox_cuda_state(4); // a multiple of 4, as torch demands
}

at::Generator drawn(uint64_t seed, uint64_t offset) {
  const uint64_t mixed = seed * 0x9E3779B97F4A7C15u + offset * 0xBF58476D1CE4E5B9u;
  return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
}

} // namespace

c10::Device current_device() {
  return {c10::kCUDA, c10::cuda::current_device()};
}

c10::Stream current_stream(c10::Device device) {
  return stream_of(name_of_current(device));
}

OnDevice::OnDevice(c10::Device device) : before_(c10::cuda::ExchangeDevice(device.index())) {}

OnDevice::~OnDevice() {
  c10::cuda::MaybeExchangeDevice(before_);
}

namespace front {

clocks::Ticket launch(c10::Device device, const std::string& op, c10::ArrayRef<Touch> touches, bool later) {
  return launch_on(name_of_current(device), op, touches, later ? standin::Turn::kLater : standin::Turn::kAtOnce);
}

bool is_skipping() {
  return standin::is_skipping();
}

bool is_capturing() {
  return standin::anybody_captures() && standin::is_capturing(name_of_current(current_device()));
}

void later(c10::Device device, std::function<void()> work) {
  standin::in_turn(name_of_current(device), std::move(work));
}

void host_waits(c10::Device device, const std::string& op) {
  const auto stream = name_of_current(device);
  if (auto* watcher = standin::watcher()) {
    watcher->host_waited_for_stream(stream, op.c_str());
  }
}

c10::Allocator* allocator() {
  return c10::cuda::CUDACachingAllocator::get();
}

c10::DataPtr adopt(const c10::Storage& made, c10::Device device) {
  if (made.nbytes() == 0) {
    return {nullptr, nullptr, &c10::detail::deleteNothing, device};
  }
  return copied_to(*made.unsafeGetStorageImpl(), device);
}

void convert(c10::StorageImpl& made, c10::Device device) {
  made.set_data_ptr_noswap(copied_to(made, device));
  made.set_allocator(allocator());
}

bool wrote(const clocks::Ticket& ticket, const std::string& op, const c10::DataPtr& data, size_t bytes) {
  const auto place = place_of(data, data.device());
  if (!place.block || bytes == 0) {
    return false;
  }
  clocks::touches(ticket, op, Touch{place.block, {{place.begin, place.begin + bytes}}, true, "result", nullptr});
  return true;
}

Place place_of(const c10::DataPtr& data, c10::Device) {
  const auto part = standin::part_of(data.get(), 1, false, "");
  return part.memory ? Place{static_cast<Tracked*>(part.memory->watched), part.begin} : Place{};
}

// Draws from a seed made of the seed and the offset of torch's own generator, whose offset goes on: so its state can be
// saved and set, and draws are repeated as on a GPU.
at::Generator drawn_from(const at::Generator& generator) {
  const auto state = next_state(generator);
  TORCH_CHECK_NOT_IMPLEMENTED(!state.captured_, "the stand-in for CUDA cannot capture an operator that draws a seed");
  return drawn(state.seed_.val, state.offset_.val);
}

// torch writes seed and offset into memory of the device before each launch of a graph. They are read where a kernel
// would read them.
std::function<at::Generator()> draws_from(const at::Generator& generator) {
  const auto state = next_state(generator);
  if (!state.captured_) {
    return [made = drawn(state.seed_.val, state.offset_.val)] { return made; };
  }
  return [state] {
    return drawn(static_cast<uint64_t>(*state.seed_.ptr),
                 static_cast<uint64_t>(*state.offset_.ptr) + state.offset_intragraph_);
  };
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  return at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, device));
}

} // namespace front
} // namespace simulated
