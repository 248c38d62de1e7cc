// Entry points: errors, initialisation, devices, contexts, the profiler. Each follows CUDA's documentation; double.hpp
// lists the simplifications.
#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <utility>

#include "simulated_driver/capture.hpp"
#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {
namespace {

constexpr std::uint32_t kApiVersion = 13000;

struct ErrorText {
  CUresult error;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_FILE_NOT_FOUND, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM",
     "OS call failed or operation not supported on this OS"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {CUDA_ERROR_LOSSY_QUERY, "CUDA_ERROR_LOSSY_QUERY",
     "the API call would return a result that is missing information"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE",
     "cannot set while device is active in this process"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
     "too many blocks in cooperative launch"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would merge two capture sequences"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in its stream"},
    {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
     "the graph update was not performed because it included changes which violated constraints specific to "
     "instantiated "
     "graph update"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult name_error(CUresult error, const char** to, const char* ErrorText::*member) {
  if (to == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto* const found =
      std::find_if(std::begin(kErrors), std::end(kErrors), [&](const auto& e) { return e.error == error; });
  *to = found == std::end(kErrors) ? nullptr : found->*member;
  return *to == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

constexpr std::pair<CUdevice_attribute, int> kAttributes[] = {
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, kSmCount},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, INT32_MAX},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, kSharedBytesDefault},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, kSharedBytesOptIn},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 * 1024},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, kMaxBlocksPerSm},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1'980'000},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3'201'000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6144},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 * 1024 * 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, INT32_MAX},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
};

// Of others 0, CU_DEVICE_ATTRIBUTE_MPS_ENABLED among them: nothing else is there.
int device_attribute(CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) return device + 1;
  if (attribute == CU_DEVICE_ATTRIBUTE_INTEGRATED) return driver().integrated;
  const auto* const found = std::find_if(std::begin(kAttributes), std::end(kAttributes),
                                         [&](const auto& known) { return known.first == attribute; });
  return found == std::end(kAttributes) ? 0 : found->second;
}

std::shared_ptr<Context> primary_context(CUdevice device) { return gpu(device).primary; }

std::shared_ptr<Context> find_context(CUcontext handle) {
  const std::shared_ptr<Context> context = find(driver().contexts, handle, CUDA_ERROR_INVALID_CONTEXT);
  require(context->slot >= 0, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  return context;
}

std::shared_ptr<Context> context_or_current(CUcontext handle) {
  return handle == nullptr ? current_context() : find_context(handle);
}

CUresult create_context(CUcontext* handle, unsigned flags, CUdevice device) {
  if (handle == nullptr || (flags & ~static_cast<unsigned>(CU_CTX_FLAGS_MASK)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    gpu(device);
    auto context = std::make_shared<Context>();
    context->device = device;
    context->flags = flags;
    context->id = driver().next_id++;
    driver().contexts.emplace(context.get(), context);
    try {
      activate_context(*context);
    } catch (const Refused&) {
      driver().contexts.erase(context.get());
      throw;
    }
    context_stack().push_back(context.get());
    *handle = reinterpret_cast<CUcontext>(context.get());
  });
}

CUresult synchronize(CUcontext handle) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Context> context = context_or_current(handle);
    refuse_capturing_context(*context);
    refuse_in_capture();
    synchronize_context(lock, context);
  });
}

void copy_text(char* to, int bytes, const char* text) {
  const std::size_t room = static_cast<std::size_t>(bytes) - 1;
  const std::size_t length = std::min(room, std::strlen(text));
  std::memcpy(to, text, length);
  to[length] = '\0';
}

}  // namespace
}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

// ---- errors, initialisation, devices

CUresult cuGetErrorName(CUresult error, const char** name) { return name_error(error, name, &ErrorText::name); }
CUresult cuGetErrorString(CUresult error, const char** text) { return name_error(error, text, &ErrorText::text); }

CUresult cuInit(unsigned flags) {
  const Steps steps;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  try {
    return initialize_driver();
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
}

CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = driver_version();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return give(device, [&] {
    gpu(ordinal);
    return ordinal;
  });
}

CUresult cuDeviceGetCount(int* count) {
  return give(count, [] { return static_cast<int>(driver().gpus.size()); });
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  if (name == nullptr || bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    gpu(device);
    copy_text(name, bytes, driver().mig != 0 ? "cudasched simulated GPU MIG 1g.18gb" : "cudasched simulated GPU");
  });
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    gpu(device);
    // The same for all processes that share the device, and another for each directory of devices.
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : driver().directory) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    std::memcpy(uuid->bytes, &hash, sizeof hash);
    std::memcpy(uuid->bytes + 8, "cs-sim\0", 7);
    uuid->bytes[15] = static_cast<char>(device);
  });
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  return give(value, [&] {
    gpu(device);
    return device_attribute(attribute, device);
  });
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  return give(bytes, [&] { return gpu(device).shared.memory_bytes(); });
}

CUresult cuDeviceGetPCIBusId(char* id, int bytes, CUdevice device) {
  if (id == nullptr || bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    gpu(device);
    char text[16];
    std::snprintf(text, sizeof text, "0000:%02X:00.0", static_cast<unsigned>(device + 1) & 0xff);
    copy_text(id, bytes, text);
  });
}

// ---- contexts

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return give(context, [&] {
    const std::shared_ptr<Context> primary = primary_context(device);
    if (primary->slot < 0) activate_context(*primary);
    ++primary->retained;
    return reinterpret_cast<CUcontext>(primary.get());
  });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Context> primary = primary_context(device);
    require(primary->retained != 0, CUDA_ERROR_INVALID_CONTEXT);
    release_primary(lock, primary);
  });
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Context> primary = primary_context(device);
    if (primary->slot >= 0) deactivate_context(lock, primary);
  });
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) { return cuDevicePrimaryCtxReset_v2(device); }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    *flags = primary_context(device)->flags;
    *active = primary_context(device)->slot >= 0 ? 1 : 0;
  });
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  if ((flags & ~static_cast<unsigned>(CU_CTX_FLAGS_MASK)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) { primary_context(device)->flags = flags; });
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags) {
  return cuDevicePrimaryCtxSetFlags_v2(device, flags);
}

CUresult cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice device) {
  return create_context(context, flags, device);
}

CUresult cuCtxCreate_v3(CUcontext* context, CUexecAffinityParam* affinity, int count, unsigned flags, CUdevice device) {
  if (affinity != nullptr || count != 0) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  return create_context(context, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext* context, CUctxCreateParams* params, unsigned flags, CUdevice device) {
  if (params != nullptr && (params->numExecAffinityParams != 0 || params->cigParams != nullptr)) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return create_context(context, flags, device);
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Context> context = find_context(handle);
    require(!context->primary, CUDA_ERROR_INVALID_CONTEXT);
    deactivate_context(lock, context);
    driver().contexts.erase(context.get());
    if (!context_stack().empty() && context_stack().back() == context.get()) context_stack().pop_back();
  });
}

// There is no attaching, so that a context has one user.
CUresult cuCtxDetach(CUcontext handle) { return cuCtxDestroy_v2(handle); }

CUresult cuCtxSetCurrent(CUcontext handle) {
  return with_driver([&](Lock&) {
    std::vector<Context*>& stack = context_stack();
    if (handle == nullptr) {
      if (!stack.empty()) stack.pop_back();
      return;
    }
    find_context(handle);
    if (stack.empty()) stack.push_back(nullptr);
    stack.back() = reinterpret_cast<Context*>(handle);  // which may be a green context's name for the primary one
  });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  return give(context, [] {
    const std::vector<Context*>& stack = context_stack();
    return reinterpret_cast<CUcontext>(stack.empty() ? nullptr : stack.back());
  });
}

CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  return with_driver([&](Lock&) {
    find_context(handle);
    context_stack().push_back(reinterpret_cast<Context*>(handle));
  });
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  return with_driver([&](Lock&) {
    std::vector<Context*>& stack = context_stack();
    require(!stack.empty(), CUDA_ERROR_INVALID_CONTEXT);
    if (context != nullptr) *context = reinterpret_cast<CUcontext>(stack.back());
    stack.pop_back();
  });
}

CUresult cuCtxGetDevice(CUdevice* device) { return cuCtxGetDevice_v2(device, nullptr); }
CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext handle) {
  return give(device, [&] { return context_or_current(handle)->device; });
}

CUresult cuCtxSynchronize() { return synchronize(nullptr); }
CUresult cuCtxSynchronize_v2(CUcontext handle) { return synchronize(handle); }

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return with_driver([&](Lock&) {
    current_context();
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = kGreatestPriority;
  });
}

CUresult cuCtxGetApiVersion(CUcontext handle, unsigned* version) {
  return give(version, [&] {
    context_or_current(handle);
    return kApiVersion;
  });
}

CUresult cuCtxGetFlags(unsigned* flags) {
  return give(flags, [] { return current_context()->flags; });
}

CUresult cuCtxGetId(CUcontext handle, unsigned long long* id) {
  return give(id, [&] { return context_or_current(handle)->id; });
}

// ---- profiler

CUresult cuProfilerStart() {
  return with_driver([](Lock&) { current_context(); });
}

CUresult cuProfilerStop() { return cuProfilerStart(); }

CUresult cuGetExportTable(const void** table, const CUuuid* id) {
  if (table == nullptr || id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
#pragma GCC visibility pop
