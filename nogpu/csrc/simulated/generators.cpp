#include "generators.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <mutex>

#include "current.h"
#include "ceilings.h"

namespace simulated {
namespace {

// The generator of a simulated device. It draws from a CPU generator, so that a seed gives the same numbers on every
// device and on the CPU.
class SimulatedGenerator final : public c10::GeneratorImpl {
 public:
  SimulatedGenerator(c10::DeviceIndex device, at::Generator source)
      : c10::GeneratorImpl(c10::Device(c10::kPrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        source_(std::move(source)) {}
  void set_current_seed(uint64_t seed) override {
    const auto lock = locked();
    source_.set_current_seed(seed);
  }
  // torch gets and sets the offset of a generator when it copies one that is not the CPU's.
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
  // Kernels hold the source's mutex while they draw. torch holds only this generator's own.
  std::unique_lock<std::mutex> locked() const {
    return std::unique_lock<std::mutex>(source_.mutex());
  }
  mutable at::Generator source_;
};

} // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<SimulatedGenerator>(device, at::detail::createCPUGenerator());
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

} // namespace simulated
