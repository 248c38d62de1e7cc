// Entry points: modules, libraries, functions.
#include <cuda.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "simulated_driver/capture.hpp"
#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {
namespace {

std::vector<std::shared_ptr<const KernelSpec>> load_specs(const void* image) {
  require(image != nullptr);
  const auto* const text = static_cast<const char*>(image);
  auto parsed = parse_image({text, strnlen(text, kImageBytesMax + 1)});
  require(parsed.has_value(), CUDA_ERROR_INVALID_IMAGE);
  std::vector<std::shared_ptr<const KernelSpec>> specs;
  for (KernelSpec& spec : *parsed) specs.push_back(std::make_shared<const KernelSpec>(std::move(spec)));
  return specs;
}

CUresult load_module(CUmodule* module, const void* image) {
  return give(module, [&] {
    const std::shared_ptr<Context> context = current_context();
    auto loaded = make_module(context, load_specs(image));
    const auto handle = reinterpret_cast<CUmodule>(loaded.get());
    driver().modules.emplace(loaded.get(), std::move(loaded));
    return handle;
  });
}

std::string load_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  require(file.is_open(), CUDA_ERROR_FILE_NOT_FOUND);
  std::string text(std::istreambuf_iterator<char>(file), {});
  require(text.find('\0') == std::string::npos, CUDA_ERROR_INVALID_IMAGE);
  return text;
}

Kernel& find_kernel(CUkernel handle) { return *find(driver().kernels, handle); }

// A function by its own handle only, for calls that refuse a CUkernel.
Function& find_plain_function(CUfunction handle) { return *find(driver().functions, handle); }

// The function that a kernel is in a device's primary context.
Function& primary_function(CUkernel handle, CUdevice device) {
  const std::shared_ptr<Context> primary = gpu(device).primary;
  Kernel& kernel = find_kernel(handle);
  require(primary->slot >= 0, CUDA_ERROR_INVALID_CONTEXT);
  return function_of(kernel, primary);
}

// That has the name, of a module's functions or a library's kernels.
template <class Handle, class Items>
Handle named(const Items& items, const char* name) {
  for (const auto& item : items) {
    if (item->spec->name == name) return reinterpret_cast<Handle>(item.get());
  }
  throw Refused(CUDA_ERROR_NOT_FOUND);
}

void param_info(const KernelSpec& spec, std::size_t index, std::size_t* offset, std::size_t* bytes) {
  require(offset != nullptr && index < spec.param_bytes.size());
  *offset = spec.param_offsets[index];
  if (bytes != nullptr) *bytes = spec.param_bytes[index];
}

int get_attribute(const Function& function, CUfunction_attribute attribute) {
  const KernelSpec& spec = *function.spec;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return static_cast<int>(spec.threads_max);
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      return static_cast<int>(spec.shared_bytes);
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      return static_cast<int>(spec.regs);
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      return 90;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      return function.dynamic_shared_bytes_max;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return function.carveout;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      return function.non_portable_cluster;
    default:
      require(attribute >= 0 && attribute < CU_FUNC_ATTRIBUTE_MAX);
      return 0;
  }
}

void set_attribute(Function& function, CUfunction_attribute attribute, int value) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      require(value >= 0 && value + static_cast<int>(function.spec->shared_bytes) <= kSharedBytesOptIn);
      function.dynamic_shared_bytes_max = value;
      break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      require(value >= -1 && value <= 100);
      function.carveout = value;
      break;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      function.non_portable_cluster = value;
      break;
    default:
      throw Refused(CUDA_ERROR_INVALID_VALUE);
  }
}

}  // namespace
}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

CUresult cuModuleLoadData(CUmodule* module, const void* image) { return load_module(module, image); }

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return load_module(module, image);
}

CUresult cuModuleLoad(CUmodule* module, const char* path) {
  if (const CUresult result = may_call(); result != CUDA_SUCCESS) return result;
  if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  try {
    return load_module(module, load_file(path).c_str());
  } catch (const Refused& refused) {
    return refused.result;
  } catch (const std::exception&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
}

CUresult cuModuleUnload(CUmodule handle) {
  return with_driver([&](Lock& lock) {
    current_context();
    const std::shared_ptr<Context> context = find(driver().modules, handle)->context;
    refuse_in_capture();
    synchronize_context(lock, context);
    drop_functions(*find(driver().modules, handle));
    driver().modules.erase(reinterpret_cast<Module*>(handle));
  });
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return give(function, [&] { return named<CUfunction>(find(driver().modules, handle)->functions, name); });
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  return give(mode, [] { return CU_MODULE_EAGER_LOADING; });
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*,
                           void**, unsigned) {
  return give(library, [&] {
    auto loaded = std::make_unique<Library>();
    loaded->specs = load_specs(code);
    for (const auto& spec : loaded->specs) {
      auto kernel = std::make_unique<Kernel>(Kernel{loaded.get(), loaded->kernels.size(), spec});
      driver().kernels.emplace(kernel.get(), kernel.get());
      loaded->kernels.push_back(std::move(kernel));
    }
    const auto handle = reinterpret_cast<CUlibrary>(loaded.get());
    driver().libraries.emplace(loaded.get(), std::move(loaded));
    return handle;
  });
}

CUresult cuLibraryUnload(CUlibrary handle) {
  return with_driver([&](Lock& lock) {
    std::vector<std::shared_ptr<Context>> contexts;
    for (const auto& [key, module] : find(driver().libraries, handle)->modules) contexts.push_back(module->context);
    for (const auto& context : contexts) settle(lock, *context);
    const Library& library = *find(driver().libraries, handle);
    for (const auto& [key, module] : library.modules) drop_functions(*module);
    for (const auto& kernel : library.kernels) driver().kernels.erase(kernel.get());
    driver().libraries.erase(reinterpret_cast<Library*>(handle));
  });
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary handle, const char* name) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return give(kernel, [&] { return named<CUkernel>(find(driver().libraries, handle)->kernels, name); });
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel handle) {
  return give(function, [&] {
    const std::shared_ptr<Context> context = current_context();
    return reinterpret_cast<CUfunction>(&function_of(find_kernel(handle), context));
  });
}

CUresult cuKernelGetLibrary(CUlibrary* library, CUkernel handle) {
  return give(library, [&] { return reinterpret_cast<CUlibrary>(find_kernel(handle).library); });
}

CUresult cuKernelGetName(const char** name, CUkernel handle) {
  return give(name, [&] { return find_kernel(handle).spec->name.c_str(); });
}

CUresult cuKernelGetParamInfo(CUkernel handle, size_t index, size_t* offset, size_t* bytes) {
  return with_driver([&](Lock&) { param_info(*find_kernel(handle).spec, index, offset, bytes); });
}

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel handle, CUdevice device) {
  return give(value, [&] { return get_attribute(primary_function(handle, device), attribute); });
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle, CUdevice device) {
  return with_driver([&](Lock&) { set_attribute(primary_function(handle, device), attribute, value); });
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  return give(value, [&] { return get_attribute(find_function(handle, current_context()), attribute); });
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  return with_driver([&](Lock&) { set_attribute(find_function(handle, current_context()), attribute, value); });
}

CUresult cuFuncGetName(const char** name, CUfunction handle) {
  return give(name, [&] {
    const auto found = driver().functions.find(reinterpret_cast<Function*>(handle));
    const auto& spec =
        found != driver().functions.end() ? found->second->spec : find_kernel(reinterpret_cast<CUkernel>(handle)).spec;
    return spec->name.c_str();
  });
}

CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset, size_t* bytes) {
  return with_driver([&](Lock&) { param_info(*find_plain_function(handle).spec, index, offset, bytes); });
}

CUresult cuFuncGetModule(CUmodule* module, CUfunction handle) {
  return give(module, [&] { return reinterpret_cast<CUmodule>(find_plain_function(handle).module); });
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction handle, int threads,
                                                              size_t shared, unsigned flags) {
  if ((flags & ~static_cast<unsigned>(CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE)) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (threads <= 0) return CUDA_ERROR_INVALID_VALUE;
  return give(blocks, [&] {
    const KernelSpec& spec = *find_function(handle, current_context()).spec;
    return static_cast<int>(occupancy(spec, static_cast<std::uint32_t>(threads), shared));
  });
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t shared) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

}  // extern "C"
#pragma GCC visibility pop
