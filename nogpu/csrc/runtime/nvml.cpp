// NVML: what monitors and torch ask of the devices. It sees all devices of the machine, whatever CUDA_VISIBLE_DEVICES
// says, and needs no context. Its header comes with no wheel that torch needs, so its few types are declared here.
#include <unistd.h>

#include <cstring>

#include "properties.h"
#include "state.h"

namespace standin {

namespace {

// Numbers of NVML.
enum Status : int {
  kSuccess = 0,
  kUninitialized = 1,
  kInvalidArgument = 2,
  kNotSupported = 3,
  kNotFound = 6,
  kInsufficientSize = 7,
  kUnknown = 999
};

struct Handle {
  int physical;
};

struct MemoryInfo {
  unsigned long long total, free, used;
};

struct MemoryInfoV2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

struct Utilization {
  unsigned gpu, memory;
};

struct PciInfo {
  char short_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
};

struct ProcessV1 {
  unsigned pid;
  unsigned long long used;
};

struct Process {
  unsigned pid;
  unsigned long long used;
  unsigned instance, compute_instance;
};

std::atomic<int> initialized{0};

Handle* handle_at(int physical) {
  static auto& handles = *[] {
    auto* made = new Handle[kMaxDevices];
    for (int i = 0; i < kMaxDevices; ++i) {
      made[i].physical = i;
    }
    return made;
  }();
  return physical >= 0 && physical < machine().devices ? &(&handles)[physical] : nullptr;
}

// The frame of a function about a device.
template <class Body>
int about(Handle* handle, const Body& body) {
  if (initialized == 0) {
    return kUninitialized;
  }
  for (int i = 0; i < machine().devices; ++i) {
    if (handle == handle_at(i)) {
      return body(i);
    }
  }
  return kInvalidArgument;
}

int put(const std::string& text, char* to, unsigned bytes) {
  if (to == nullptr) {
    return kInvalidArgument;
  }
  if (bytes <= text.size()) {
    return kInsufficientSize;
  }
  std::memcpy(to, text.c_str(), text.size() + 1);
  return kSuccess;
}

// The device as this process sees it, or null.
Device* seen(int physical) {
  for (int i = 0; i < device_count(); ++i) {
    if (device_at(i).physical == physical) {
      return &device_at(i);
    }
  }
  return nullptr;
}

MemoryInfo memory_of_device(int physical) {
  const auto* device = seen(physical);
  const unsigned long long total = device ? capacity_of(device->index) : machine().bytes;
  const unsigned long long used = device ? device->used.load() : 0;
  return {total, total - std::min(total, used), used};
}

// This process, if it has a context.
template <class Entry>
int processes(Handle* handle, unsigned* count, Entry* entries) {
  return about(handle, [&](int physical) {
    const auto* device = seen(physical);
    const unsigned known = device != nullptr && device->context ? 1 : 0;
    if (*count < known) {
      *count = known;
      return static_cast<int>(kInsufficientSize);
    }
    *count = known;
    if (known == 1) {
      entries[0] = Entry();
      entries[0].pid = static_cast<unsigned>(getpid());
      entries[0].used = device->used;
    }
    return static_cast<int>(kSuccess);
  });
}

template <class Value>
int answer(Handle* handle, Value* to, Value value) {
  return about(handle, [&](int) {
    *to = value;
    return static_cast<int>(kSuccess);
  });
}

int find_device(Handle** handle, const char* text, std::string (*name)(int)) {
  for (int i = 0; i < machine().devices; ++i) {
    // Bus ids are written with domains of four or eight digits.
    const auto known = name(i), given = std::string(text);
    if (given == known || (given.size() > known.size() && given.substr(given.size() - known.size()) == known)) {
      *handle = handle_at(i);
      return kSuccess;
    }
  }
  return kNotFound;
}

} // namespace
} // namespace standin

using namespace standin;

#pragma GCC visibility push(default)

extern "C" {

int nvmlInit_v2() {
  ++initialized;
  return kSuccess;
}

int nvmlInit() {
  return nvmlInit_v2();
}

int nvmlInitWithFlags(unsigned) {
  return nvmlInit_v2();
}

int nvmlShutdown() {
  if (initialized == 0) {
    return kUninitialized;
  }
  --initialized;
  return kSuccess;
}

const char* nvmlErrorString(int status) {
  switch (status) {
    case kSuccess: return "Success";
    case kUninitialized: return "Uninitialized";
    case kInvalidArgument: return "Invalid Argument";
    case kNotSupported: return "Not Supported";
    case kNotFound: return "Not Found";
    case kInsufficientSize: return "Insufficient Size";
    default: return "Unknown Error";
  }
}

int nvmlSystemGetDriverVersion(char* text, unsigned bytes) {
  return put("580.0", text, bytes); // the first of CUDA 13
}

int nvmlSystemGetNVMLVersion(char* text, unsigned bytes) {
  return put("13.580.0", text, bytes);
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDA_VERSION;
  return kSuccess;
}

int nvmlSystemGetCudaDriverVersion(int* version) {
  return nvmlSystemGetCudaDriverVersion_v2(version);
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(machine().devices);
  return initialized == 0 ? kUninitialized : kSuccess;
}

int nvmlDeviceGetCount(unsigned* count) {
  return nvmlDeviceGetCount_v2(count);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle** handle) {
  *handle = handle_at(static_cast<int>(index));
  return initialized == 0 ? kUninitialized : *handle == nullptr ? kInvalidArgument : kSuccess;
}

int nvmlDeviceGetHandleByIndex(unsigned index, Handle** handle) {
  return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

int nvmlDeviceGetHandleByUUID(const char* uuid, Handle** handle) {
  return initialized == 0 ? kUninitialized : find_device(handle, uuid, uuid_text);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, Handle** handle) {
  return initialized == 0 ? kUninitialized : find_device(handle, id, pci_bus_id);
}

int nvmlDeviceGetIndex(Handle* handle, unsigned* index) {
  return about(handle, [&](int physical) {
    *index = static_cast<unsigned>(physical);
    return kSuccess;
  });
}

int nvmlDeviceGetMinorNumber(Handle* handle, unsigned* number) {
  return nvmlDeviceGetIndex(handle, number);
}

int nvmlDeviceGetName(Handle* handle, char* text, unsigned bytes) {
  return about(handle, [&](int) { return put(machine().name, text, bytes); });
}

int nvmlDeviceGetUUID(Handle* handle, char* text, unsigned bytes) {
  return about(handle, [&](int physical) { return put(uuid_text(physical), text, bytes); });
}

int nvmlDeviceGetPciInfo_v3(Handle* handle, PciInfo* info) {
  return about(handle, [&](int physical) {
    *info = {};
    info->bus = static_cast<unsigned>(physical + 1);
    put(pci_bus_id(physical), info->short_id, sizeof info->short_id);
    return put("0000" + pci_bus_id(physical), info->id, sizeof info->id);
  });
}

int nvmlDeviceGetCudaComputeCapability(Handle* handle, int* major, int* minor) {
  return about(handle, [&](int) {
    *major = machine().major;
    *minor = machine().minor;
    return kSuccess;
  });
}

int nvmlDeviceGetMemoryInfo(Handle* handle, MemoryInfo* info) {
  return about(handle, [&](int physical) {
    *info = memory_of_device(physical);
    return kSuccess;
  });
}

int nvmlDeviceGetMemoryInfo_v2(Handle* handle, MemoryInfoV2* info) {
  return about(handle, [&](int physical) {
    const auto known = memory_of_device(physical);
    *info = {info->version, known.total, 0, known.free, known.used};
    return kSuccess;
  });
}

int nvmlDeviceGetComputeRunningProcesses(Handle* handle, unsigned* count, ProcessV1* entries) {
  return processes(handle, count, entries);
}

int nvmlDeviceGetComputeRunningProcesses_v2(Handle* handle, unsigned* count, Process* entries) {
  return processes(handle, count, entries);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle* handle, unsigned* count, Process* entries) {
  return processes(handle, count, entries);
}

// Work is done when it is launched, so nothing is ever busy.
int nvmlDeviceGetUtilizationRates(Handle* handle, Utilization* rates) {
  return answer(handle, rates, Utilization{0, 0});
}

int nvmlDeviceGetTemperature(Handle* handle, int, unsigned* degrees) {
  return answer(handle, degrees, 30u);
}

int nvmlDeviceGetPowerUsage(Handle* handle, unsigned* milliwatts) {
  return answer(handle, milliwatts, 0u);
}

int nvmlDeviceGetClockInfo(Handle* handle, int, unsigned* megahertz) {
  return answer(handle, megahertz, 1410u);
}

int nvmlDeviceGetEccMode(Handle* handle, unsigned* now, unsigned* later) {
  *later = machine().ecc;
  return answer(handle, now, static_cast<unsigned>(machine().ecc));
}

// 0: works, 5: not supported.
int nvmlDeviceGetP2PStatus(Handle* handle, Handle* other, int, int* status) {
  return about(handle, [&](int from) {
    return about(other, [&](int to) {
      const auto *device = seen(from), *peer = seen(to);
      const bool missing = device && peer && link_between(device->index, peer->index) == Link::kMissing;
      *status = missing || from == to ? 5 : 0;
      return kSuccess;
    });
  });
}

// There is no NVLink: devices are connected as by PCI Express.
int nvmlDeviceGetNvLinkState(Handle* handle, unsigned, unsigned*) {
  return about(handle, [](int) { return kNotSupported; });
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Handle* handle, unsigned, unsigned*) {
  return about(handle, [](int) { return kNotSupported; });
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle* handle, unsigned, PciInfo*) {
  return about(handle, [](int) { return kNotSupported; });
}

} // extern "C"

#pragma GCC visibility pop
