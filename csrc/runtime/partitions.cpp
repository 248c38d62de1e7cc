#include "runtime/partitions.hpp"

#include <algorithm>
#include <cmath>
#include <new>
#include <string>

#include "base/error.hpp"
#include "cudasched/engine.h"
#include "driver/driver.hpp"
#include "runtime/engine.hpp"
#include "runtime/guarded.hpp"

namespace cudasched::runtime {
namespace {

using driver::check;
using driver::table;

constexpr unsigned kUsualStep = 8;  // the step from Hopper on, where a driver does not say (before 13.0)

// Green contexts belong to the device's primary context, and so do their streams.
CUdevice device_of_primary_context() {
  CUcontext current = nullptr;
  check("cuCtxGetCurrent", table().cuCtxGetCurrent(&current));
  if (current == nullptr) {
    throw Error("a part of the SMs needs a current context: make a CUDA call on this thread first");
  }
  CUdevice device = 0;
  check("cuCtxGetDevice", table().cuCtxGetDevice(&device));
  CUcontext primary = nullptr;
  check("cuDevicePrimaryCtxRetain", table().cuDevicePrimaryCtxRetain(&primary, device));
  table().cuDevicePrimaryCtxRelease(device);
  if (primary != current) {
    throw Error(
        "a part of the SMs can be used from the device's primary context alone, and another context is current; "
        "cudaSetDevice() makes the primary one current");
  }
  return device;
}

CUdevResource all_sms(CUdevice device) {
  CUdevResource all{};
  check("cuDeviceGetDevResource", table().cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
  return all;
}

// A green context of so many SMs, and its stream, bound to best effort.
CUstream make(CUdevice device, const CUdevResource& all, unsigned sms) {
  CUdevResource part{};
  unsigned groups = 1;
  check("cuDevSmResourceSplitByCount", table().cuDevSmResourceSplitByCount(&part, &groups, &all, nullptr, 0, sms));
  CUdevResourceDesc description = nullptr;
  check("cuDevResourceGenerateDesc", table().cuDevResourceGenerateDesc(&description, &part, 1));
  CUgreenCtx green = nullptr;
  check("cuGreenCtxCreate", table().cuGreenCtxCreate(&green, description, device, CU_GREEN_CTX_DEFAULT_STREAM));
  int lowest = 0;
  table().cuCtxGetStreamPriorityRange(&lowest, nullptr);
  CUstream stream = nullptr;
  try {
    check("cuGreenCtxStreamCreate", table().cuGreenCtxStreamCreate(&stream, green, CU_STREAM_NON_BLOCKING, lowest));
    engine().bind_stream(reinterpret_cast<std::uintptr_t>(stream), Class::kBestEffort);
    return stream;
  } catch (const Error&) {
    if (stream != nullptr) table().cuStreamDestroy(stream);
    table().cuGreenCtxDestroy(green);
    throw;
  }
}

}  // namespace

unsigned partition_sms(double fraction, unsigned total, unsigned least, unsigned step) noexcept {
  const auto share = static_cast<unsigned>(std::floor(fraction * total));
  const unsigned sms = std::max(share / step * step, least);
  return sms < total ? sms : 0;
}

CUstream Partitions::stream(double fraction) {
  if (!(fraction > 0 && fraction < 1)) {
    throw ConfigError("a part of the SMs is a fraction of more than 0 and less than 1; got " +
                      std::to_string(fraction));
  }
  if (!engine().lifecycle().attached())
    throw HookError("a part of the SMs needs the hook: import cudasched before torch, and make a CUDA call first");
  if (table().cuDeviceGetDevResource == nullptr || table().cuDevSmResourceSplitByCount == nullptr ||
      table().cuDevResourceGenerateDesc == nullptr || table().cuGreenCtxCreate == nullptr ||
      table().cuGreenCtxStreamCreate == nullptr) {
    throw HookError("a part of the SMs needs green contexts, which drivers have from CUDA 12.5 (release 555) on");
  }
  const driver::RelaxedCapture relaxed;
  const CUdevice device = device_of_primary_context();
  const CUdevResource all = all_sms(device);
  const unsigned step = all.sm.smCoscheduledAlignment != 0 ? all.sm.smCoscheduledAlignment : kUsualStep;
  const unsigned least = all.sm.minSmPartitionSize != 0 ? all.sm.minSmPartitionSize : step;
  const unsigned sms = partition_sms(fraction, all.sm.smCount, least, step);
  if (sms == 0) {
    throw ConfigError("this device has " + std::to_string(all.sm.smCount) +
                      " SMs (a MIG device, or a client of MPS, has "
                      "fewer than the GPU), and a part of them is at least " +
                      std::to_string(least));
  }
  const std::scoped_lock lock(mutex_);
  const auto same = [&](const Partition& made) { return made.device == device && made.sms == sms; };
  const auto known = std::find_if(made_.begin(), made_.end(), same);
  if (known != made_.end()) return known->stream;
  made_.reserve(made_.size() + 1);
  made_.push_back({device, sms, make(device, all, sms)});
  return made_.back().stream;
}

void Partitions::primary_context_ended(CUdevice device) noexcept {
  const std::scoped_lock lock(mutex_);
  std::erase_if(made_, [&](const Partition& made) { return made.device == device; });
}

void Partitions::reset_in_child() noexcept {
  new (&mutex_) std::mutex;
  new (&made_) std::vector<Partition>;
}

Partitions& partitions() noexcept {
  // Never destroyed: other threads may still enter regions while the process exits.
  alignas(Partitions) static unsigned char storage[sizeof(Partitions)];
  static Partitions* const instance = new (storage) Partitions();
  return *instance;
}

}  // namespace cudasched::runtime

extern "C" int cudasched_partition_stream(double fraction, std::uint64_t* stream) {
  return cudasched::runtime::guarded(
      [&] { *stream = reinterpret_cast<std::uintptr_t>(cudasched::runtime::partitions().stream(fraction)); });
}
