// What each kind of devices provides for the files in this folder. ../simulated and ../cuda implement it, each in an
// extension of its own: the files here are compiled once for each.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <string>

#include "clocks.h"
#include "keys.h"

namespace simulated {

c10::Device current_device();
// Streams of the clocks: the id is a small number, and 0 is the default stream.
c10::Stream current_stream(c10::Device device);

// Makes a device current until this object is destroyed.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex before_;
};

namespace front {

// A launch on the current stream of the device, as `clocks::launch`. If the stream captures, it is kept. What is done `later` goes to that function next, and
// anything else is done by the caller at once.
clocks::Ticket launch(c10::Device device, const std::string& op, c10::ArrayRef<Touch> touches, bool later);

// True while work that is passed to `later` is left out.
bool is_skipping();
// True if the current stream of the current device captures what it is given.
bool is_capturing();
// Work of the current stream of the device, done in its turn.
void later(c10::Device device, std::function<void()> work);

// The host waits for the current stream of the device, because the operator's result depends on values.
void host_waits(c10::Device device, const std::string& op);

c10::Allocator* allocator();
// Memory of `device` with the bytes that an operator has made on the CPU. For a meta storage it is memory of the same
// size, without them. Throws c10::OutOfMemoryError.
c10::DataPtr adopt(const c10::Storage& made, c10::Device device);
// The same for a storage with memory that nobody else refers to: the storage itself becomes one of `device`.
void convert(c10::StorageImpl& made, c10::Device device);
// Tells the clocks that the launch itself has allocated and written this memory. Returns false if it is none of a device.
bool wrote(const clocks::Ticket& ticket, const std::string& op, const c10::DataPtr& data, size_t bytes);

// Where the memory of a storage begins in a block that the clocks know. Null if they know none.
struct Place {
  Tracked* block = nullptr;
  size_t begin = 0;
};
Place place_of(const c10::DataPtr& data, c10::Device device);

// A generator of the CPU that draws for one of a device.
at::Generator drawn_from(const at::Generator& generator);
// What makes that generator each time the launch is done: at each launch of a graph it draws something else.
std::function<at::Generator()> draws_from(const at::Generator& generator);
const at::Generator& default_generator(c10::DeviceIndex device);

} // namespace front
} // namespace simulated
