// The machine: how many devices there are and what they say of themselves, how they are linked, and who watches. Set
// before the first call of CUDA; programs in Python set it by the C functions at the end.
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "state.h"

namespace standin {

namespace {

Machine& the_machine() {
  static auto& machine = *new Machine; // threads may run until the process ends
  return machine;
}

std::atomic<bool> fixed{false};
std::atomic<Link> links[kMaxDevices][kMaxDevices];
std::atomic<size_t> capacities[kMaxDevices]; // 0: the machine's
std::atomic<Watcher*> the_watcher{nullptr};

void check_device(int device) {
  if (device < 0 || device >= kMaxDevices) {
    throw std::invalid_argument("device " + std::to_string(device) + ": the stand-in has room for devices 0 to " +
                                std::to_string(kMaxDevices - 1));
  }
}

// CUDA_VISIBLE_DEVICES: indices or UUIDs, up to the first that is neither.
std::vector<int> visible_devices() {
  std::vector<int> result;
  const auto* setting = std::getenv("CUDA_VISIBLE_DEVICES");
  const auto count = the_machine().devices;
  if (setting == nullptr) {
    for (int i = 0; i < count; ++i) {
      result.push_back(i);
    }
    return result;
  }
  std::istringstream parts(setting);
  for (std::string part; std::getline(parts, part, ',');) {
    int index = -1;
    char* end = nullptr;
    const auto number = std::strtol(part.c_str(), &end, 10);
    if (end != part.c_str() && number >= 0 && number < count) {
      index = static_cast<int>(number);
    }
    for (int i = 0; index < 0 && i < count; ++i) {
      index = part == uuid_text(i) ? i : -1;
    }
    if (index < 0) {
      break;
    }
    result.push_back(index);
  }
  return result;
}

} // namespace

std::vector<std::unique_ptr<Device>>& devices() {
  static auto& devices = *[] {
    fixed = true;
    auto* made = new std::vector<std::unique_ptr<Device>>;
    for (const auto physical : visible_devices()) {
      auto device = std::make_unique<Device>();
      device->index = static_cast<int>(made->size());
      device->physical = physical;
      device->legacy.name = {device->index, 0};
      made->push_back(std::move(device));
    }
    return made;
  }();
  return devices;
}

bool is_used() {
  return fixed;
}

void set_machine(const Machine& machine) {
  if (fixed) {
    throw std::logic_error("the machine was used already: set it before the first call of CUDA");
  }
  if (machine.devices < 0 || machine.devices > kMaxDevices) {
    throw std::invalid_argument("a machine has 0 to " + std::to_string(kMaxDevices) + " devices; got " +
                                std::to_string(machine.devices));
  }
  the_machine() = machine;
}

const Machine& machine() {
  return the_machine();
}

void set_link(int from, int to, Link link) {
  check_device(from);
  check_device(to);
  links[from][to] = link;
}

Link link_between(int from, int to) {
  return links[from][to];
}

void set_capacity(int device, size_t bytes) {
  check_device(device);
  capacities[device] = bytes;
}

size_t capacity_of(int device) {
  const size_t own = capacities[device];
  return own ? own : machine().bytes;
}

void watch(Watcher* watcher) {
  the_watcher = watcher;
}

Watcher* watcher() {
  return the_watcher.load(std::memory_order_acquire);
}

std::string uuid_of(int physical) {
  std::string bytes = "nogpu-stand-in-x";
  bytes[15] = static_cast<char>(physical);
  return bytes;
}

std::string uuid_text(int physical) {
  const auto bytes = uuid_of(physical);
  std::string text = "GPU-";
  for (size_t i = 0; i < bytes.size(); ++i) {
    constexpr char digits[] = "0123456789abcdef";
    const auto byte = static_cast<unsigned char>(bytes[i]);
    text += i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

} // namespace standin
