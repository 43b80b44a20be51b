// What these devices provide for ../shared.
#include "front.h"

#include "generators.h"
#include "memory.h"

namespace simulated::front {

clocks::Ticket launch(c10::Device device, const std::string& op, c10::ArrayRef<Touch> touches, bool) {
  return clocks::launch(current_stream(device), op, touches);
}

// `skipped` leaves their operators out.
bool is_skipping() {
  return false;
}

// They have no graphs.
bool is_capturing() {
  return false;
}

void later(c10::Device, std::function<void()> work) {
  work();
}

void host_waits(c10::Device device, const std::string&) {
  clocks::host_waits(current_stream(device));
}

c10::Allocator* allocator() {
  return memory::device_allocator();
}

c10::DataPtr adopt(const c10::Storage& made, c10::Device device) {
  return memory::adopt(made, device);
}

void convert(c10::StorageImpl& made, c10::Device device) {
  memory::convert(made, device);
}

bool wrote(const clocks::Ticket& ticket, const std::string&, const c10::DataPtr& data, size_t) {
  auto* block = memory::block_of(data);
  if (block) {
    clocks::wrote(ticket, *block, block->bytes);
  }
  return block != nullptr;
}

Place place_of(const c10::DataPtr& data, c10::Device device) {
  auto* block = device.type() == kDevice ? memory::block_of(data) : memory::pinned_block_of(data.get());
  if (!block) {
    return {};
  }
  return {block, static_cast<size_t>(static_cast<const char*>(data.get()) - static_cast<const char*>(block->data))};
}

at::Generator drawn_from(const at::Generator& generator) {
  return simulated::drawn_from(generator);
}

std::function<at::Generator()> draws_from(const at::Generator& generator) {
  return [drawn = drawn_from(generator)] { return drawn; };
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  return simulated::default_generator(device);
}

} // namespace simulated::front
