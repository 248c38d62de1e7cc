// Entry points: green contexts. Their counts and names follow the driver, and their streams know them; the model runs
// their kernels on any SM.
#include <cuda.h>

#include <algorithm>

#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {
namespace {

constexpr unsigned kStep = 8;  // SMs of a partition: at least so many, and a multiple

CUdevResource resource_of(unsigned sms) {
  CUdevResource resource{};
  resource.type = CU_DEV_RESOURCE_TYPE_SM;
  resource.sm = {sms, kStep, kStep};
  return resource;
}

Green& find_green(CUgreenCtx handle) { return *find(driver().greens, handle, CUDA_ERROR_INVALID_CONTEXT); }

}  // namespace
}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource* resource, CUdevResourceType type) {
  return give(resource, [&] {
    require(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
    gpu(device);
    return resource_of(kSmCount);
  });
}

CUresult cuDevSmResourceSplitByCount(CUdevResource* result, unsigned* groups, const CUdevResource* input,
                                     CUdevResource* remaining, unsigned flags, unsigned least) {
  if (groups == nullptr || input == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (input->type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  if (least > input->sm.smCount) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  const unsigned each = std::max((least + kStep - 1) / kStep, 1U) * kStep;
  const unsigned possible = input->sm.smCount / each;
  if (possible == 0) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  *groups = result == nullptr ? possible : std::min(*groups, possible);
  if (result != nullptr) std::fill_n(result, *groups, resource_of(each));
  if (remaining != nullptr) *remaining = resource_of(input->sm.smCount - *groups * each);
  return CUDA_SUCCESS;
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* descriptor, CUdevResource* resources, unsigned count) {
  if (resources == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  return give(descriptor, [&] {
    auto made = std::make_unique<SmPartition>();
    for (unsigned i = 0; i < count; ++i) {
      require(resources[i].type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
      made->sms += resources[i].sm.smCount;
    }
    const auto handle = reinterpret_cast<CUdevResourceDesc>(made.get());
    driver().descriptors.emplace(made.get(), std::move(made));
    return handle;
  });
}

CUresult cuGreenCtxCreate(CUgreenCtx* handle, CUdevResourceDesc descriptor, CUdevice device, unsigned flags) {
  if (handle == nullptr || flags != CU_GREEN_CTX_DEFAULT_STREAM) return CUDA_ERROR_INVALID_VALUE;
  CUcontext primary = nullptr;
  if (const CUresult result = cuDevicePrimaryCtxRetain(&primary, device); result != CUDA_SUCCESS) return result;
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Context> context = driver().contexts.at(reinterpret_cast<Context*>(primary));
    const auto found = driver().descriptors.find(reinterpret_cast<SmPartition*>(descriptor));
    if (found == driver().descriptors.end()) {
      release_primary(lock, context);
      return CUDA_ERROR_INVALID_VALUE;
    }
    auto made = std::make_unique<Green>(Green{context, *found->second});
    *handle = reinterpret_cast<CUgreenCtx>(made.get());
    driver().contexts.emplace(reinterpret_cast<Context*>(made.get()), context);
    driver().greens.emplace(made.get(), std::move(made));
    return CUDA_SUCCESS;
  });
}

CUresult cuGreenCtxDestroy(CUgreenCtx handle) {
  return with_driver([&](Lock& lock) {
    Green* const green = &find_green(handle);
    const std::shared_ptr<Context> primary = green->primary;
    for (const auto& [key, stream] : primary->streams) {
      if (stream->green == green) stream->green = nullptr;
    }
    driver().contexts.erase(reinterpret_cast<Context*>(green));
    driver().greens.erase(green);
    release_primary(lock, primary);
  });
}

CUresult cuCtxFromGreenCtx(CUcontext* context, CUgreenCtx handle) {
  return give(context, [&] { return reinterpret_cast<CUcontext>(&find_green(handle)); });
}

CUresult cuGreenCtxGetDevResource(CUgreenCtx handle, CUdevResource* resource, CUdevResourceType type) {
  return give(resource, [&] {
    require(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
    return resource_of(find_green(handle).partition.sms);
  });
}

CUresult cuGreenCtxStreamCreate(CUstream* handle, CUgreenCtx green_handle, unsigned flags, int priority) {
  if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  return give(handle, [&] {
    const Green& green = find_green(green_handle);
    return open_stream(green.primary, flags, priority, &green);
  });
}

CUresult cuStreamGetGreenCtx(CUstream handle, CUgreenCtx* green) {
  return give(green, [&] {
    const bool any = handle == nullptr || handle == CU_STREAM_LEGACY;
    const std::shared_ptr<Stream> stream = find_stream(handle);
    return reinterpret_cast<CUgreenCtx>(const_cast<Green*>(any ? current_green() : stream->green));
  });
}

}  // extern "C"
#pragma GCC visibility pop
