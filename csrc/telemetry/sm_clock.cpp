#include "telemetry/sm_clock.hpp"

#include <dlfcn.h>

#include "driver/driver.hpp"

namespace cudasched::telemetry {
namespace {

// The part of NVML's interface that is used; its header is in no wheel that the build needs.
constexpr int kSuccess = 0;
constexpr int kClockSm = 1;

struct Nvml {
  int (*init)() = nullptr;
  int (*by_uuid)(const char*, void**) = nullptr;
  int (*clock)(void*, int, unsigned*) = nullptr;
  bool ready = false;

  Nvml() {
    void* const handle = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return;
    init = reinterpret_cast<decltype(init)>(dlsym(handle, "nvmlInit_v2"));
    by_uuid = reinterpret_cast<decltype(by_uuid)>(dlsym(handle, "nvmlDeviceGetHandleByUUID"));
    clock = reinterpret_cast<decltype(clock)>(dlsym(handle, "nvmlDeviceGetClockInfo"));
    ready = init != nullptr && by_uuid != nullptr && clock != nullptr && init() == kSuccess;
  }
};

Nvml& nvml() {
  static Nvml library;
  return library;
}

void* find(int device) noexcept {
  try {
    CUdevice handle = 0;
    if (!nvml().ready || driver::table().cuDeviceGet(&handle, device) != CUDA_SUCCESS) return nullptr;
    void* found = nullptr;
    return nvml().by_uuid(driver::device_uuid(handle).c_str(), &found) == kSuccess ? found : nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

std::uint16_t SmClock::sample(int device) noexcept {
  if (device < 0 || device >= kMostDevices) return 0;
  std::optional<void*>& handle = handles_[static_cast<std::size_t>(device)];
  if (!handle) handle = find(device);
  if (*handle == nullptr) return 0;
  unsigned mhz = 0;
  if (nvml().clock(*handle, kClockSm, &mhz) != kSuccess || mhz > UINT16_MAX) return 0;
  return static_cast<std::uint16_t>(mhz);
}

}  // namespace cudasched::telemetry
