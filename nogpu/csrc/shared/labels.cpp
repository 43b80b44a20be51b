#include "labels.h"

#include <array>
#include <string>

#include "ceilings.h"
#include "keys.h"

namespace simulated {

const char* label_of(c10::DeviceIndex device) {
  static const auto* labels = [] {
    auto* made = new std::array<std::string, kCeiling>();
    for (size_t i = 0; i < kCeiling; ++i) {
      (*made)[i] = c10::Device(kDevice, static_cast<c10::DeviceIndex>(i)).str();
    }
    return made;
  }();
  return labels->at(static_cast<size_t>(device)).c_str();
}

} // namespace simulated
