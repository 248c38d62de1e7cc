#include "driver/driver.hpp"

#include <array>
#include <cstdint>
#include <cstdio>

#include "base/loader.h"

namespace cudasched::driver {
namespace {

std::string describe(const char* call, CUresult status, const std::source_location& where) {
  return std::string(call) + " failed with " + table().error_name(status) + " (" + std::to_string(status) + ") at " +
         where.file_name() + ":" + std::to_string(where.line());
}

enum class Need : std::uint8_t { kNeeded, kToSchedule, kOptional };

template <typename Function>
void look_up(void* handle, Function*& function, Need need, const char* name) {
  function = reinterpret_cast<Function*>(cudasched_loader_find(handle, name));
  if (function != nullptr) return;
  if (need == Need::kToSchedule && table().lacks == nullptr) table().lacks = name;
  if (need == Need::kNeeded) {
    throw HookError(std::string("the NVIDIA driver has no ") + name +
                    "; cudasched needs a driver of release 470 or later, and 550 or later to schedule");
  }
}

}  // namespace

DriverError::DriverError(const char* call, CUresult status, std::source_location where)
    : Error(describe(call, status, where)), status_(status) {}

void Driver::load(void* handle) {
#define TEXT_OF(name) #name
#define CALL(need, name) look_up(handle, name, Need::need, TEXT_OF(name));
#define TWINS(need, name, suffix)                          \
  look_up(handle, name.legacy, Need::need, TEXT_OF(name)); \
  look_up(handle, name.per_thread, Need::need, TEXT_OF(name) suffix);
#define CALL_AS(need, name, symbol, ...) look_up(handle, name, Need::need, symbol);
#define TWINS_AS(need, name, symbol, suffix, ...)   \
  look_up(handle, name.legacy, Need::need, symbol); \
  look_up(handle, name.per_thread, Need::need, symbol suffix);
#include "driver/calls.inc"
  // Drivers of release 470 have the older one alone.
  if (cuDeviceGetUuid == nullptr) look_up(handle, cuDeviceGetUuid, Need::kNeeded, "cuDeviceGetUuid");
}

void check(const char* call, CUresult status, std::source_location where) {
  if (status != CUDA_SUCCESS) throw DriverError(call, status, where);
}

std::string Driver::error_name(CUresult status) const {
  const char* name = nullptr;
  if (cuGetErrorName != nullptr && cuGetErrorName(status, &name) == CUDA_SUCCESS && name != nullptr) return name;
  return "an unknown status";
}

std::string device_uuid(CUdevice device) {
  // A MIG instance has a UUID of its own; only its name distinguishes it from a GPU: "NVIDIA H200 MIG 1g.18gb".
  const bool is_instance = device_name(device).find(" MIG ") != std::string::npos;
  CUuuid uuid{};
  check("cuDeviceGetUuid", table().cuDeviceGetUuid(&uuid, device));
  std::string text = is_instance ? "MIG-" : "GPU-";
  for (int i = 0; i < 16; ++i) {
    std::array<char, 4> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += digits.data();
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

std::string device_name(CUdevice device) {
  std::array<char, 64> name{};
  check("cuDeviceGetName", table().cuDeviceGetName(name.data(), name.size(), device));
  return name.data();
}

int device_attribute(CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  check("cuDeviceGetAttribute", table().cuDeviceGetAttribute(&value, attribute, device));
  return value;
}

bool under_mps(CUdevice device) noexcept {
  int mps = 0;
  return table().cuDeviceGetAttribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device) == CUDA_SUCCESS && mps != 0;
}

CUcontext shareable_context() noexcept {
  CUcontext context = nullptr;
  if (table().cuCtxGetCurrent(&context) != CUDA_SUCCESS) return nullptr;
  if (!green_contexts_exist.load(std::memory_order_relaxed)) return context;
  CUgreenCtx green = nullptr;
  const bool shareable = table().cuStreamGetGreenCtx != nullptr &&
                         table().cuStreamGetGreenCtx(CU_STREAM_LEGACY, &green) == CUDA_SUCCESS && green == nullptr;
  return shareable ? context : nullptr;
}

RelaxedCapture::RelaxedCapture() noexcept { table().cuThreadExchangeStreamCaptureMode(&mode_); }
RelaxedCapture::~RelaxedCapture() { table().cuThreadExchangeStreamCaptureMode(&mode_); }

CurrentContext::CurrentContext(CUcontext context) noexcept {
  CUcontext current = nullptr;
  if (context == nullptr) status_ = CUDA_ERROR_INVALID_CONTEXT;
  if (!ok() || (table().cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context)) return;
  status_ = table().cuCtxPushCurrent(context);
  pushed_ = status_ == CUDA_SUCCESS;
}
CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  if (pushed_) table().cuCtxPopCurrent(&popped);
}

namespace {

// Null: there is none. Else the caller releases it.
CUcontext retain_if_active(CUdevice device) noexcept {
  unsigned flags = 0;
  int active = 0;
  CUcontext context = nullptr;
  if (table().cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || active == 0) return nullptr;
  return table().cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS ? context : nullptr;
}

}  // namespace

CUcontext primary_context(CUdevice device) noexcept {
  CUcontext const context = retain_if_active(device);
  if (context != nullptr) table().cuDevicePrimaryCtxRelease(device);
  return context;
}

void synchronize_primary(CUdevice device) noexcept {
  CUcontext const context = retain_if_active(device);
  if (context == nullptr) return;
  {
    const CurrentContext current(context);
    if (current.ok()) table().cuCtxSynchronize();
  }
  table().cuDevicePrimaryCtxRelease(device);
}

}  // namespace cudasched::driver
