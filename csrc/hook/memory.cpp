// Calls that make memory known to CUDA: each goes to the driver and is then noted. And calls that end handles of
// kernels: those are forgotten first.
#include "hook/memory.hpp"

#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "hook/offload.hpp"
#include "hook/taken_over.hpp"
#include "runtime/engine.hpp"

namespace cudasched::hook {
namespace {

using driver::table;

// Memory whose free is queued is not free yet: before a program hears that there is none, everything queued is
// submitted.
template <typename Allocate>
CUresult allocate_or_again(Allocate&& allocate) noexcept {
  const CUresult status = allocate();
  return status == CUDA_ERROR_OUT_OF_MEMORY && Offload::submit_everything() ? allocate() : status;
}

template <typename Pointer>
CUresult noted(CUresult status, const Pointer* pointer, std::size_t bytes) noexcept {
  if (status == CUDA_SUCCESS && pointer != nullptr) {
    runtime::engine().note_memory((std::uint64_t)*pointer, bytes);  // a CUdeviceptr or a void*
  }
  return status;
}

CUresult allocate(CUdeviceptr* pointer, std::size_t bytes) noexcept {
  return noted(allocate_or_again([&] { return table().memory_allocate(pointer, bytes); }), pointer, bytes);
}

CUresult allocate_pitch(CUdeviceptr* pointer, std::size_t* pitch, std::size_t width_bytes, std::size_t height,
                        unsigned element_bytes) noexcept {
  const CUresult status = allocate_or_again(
      [&] { return table().memory_allocate_pitch(pointer, pitch, width_bytes, height, element_bytes); });
  return noted(status, pointer, status == CUDA_SUCCESS && pitch != nullptr ? *pitch * height : 0);
}

CUresult allocate_managed(CUdeviceptr* pointer, std::size_t bytes, unsigned flags) noexcept {
  return noted(allocate_or_again([&] { return table().memory_allocate_managed(pointer, bytes, flags); }), pointer,
               bytes);
}

CUresult allocate_host(void** pointer, std::size_t bytes) noexcept {
  return noted(allocate_or_again([&] { return table().memory_allocate_host(pointer, bytes); }), pointer, bytes);
}

CUresult host_allocate(void** pointer, std::size_t bytes, unsigned flags) noexcept {
  return noted(allocate_or_again([&] { return table().memory_host_allocate(pointer, bytes, flags); }), pointer, bytes);
}

CUresult host_register(void* pointer, std::size_t bytes, unsigned flags) noexcept {
  return noted(allocate_or_again([&] { return table().memory_host_register(pointer, bytes, flags); }), &pointer, bytes);
}

template <bool kPerThread>
CUresult allocate_async(CUdeviceptr* pointer, std::size_t bytes, CUstream stream) noexcept {
  const auto call = [&] { return table().memory_allocate_async.get<kPerThread>()(pointer, bytes, stream); };
  return noted(allocate_or_again(call), pointer, bytes);
}

template <bool kPerThread>
CUresult allocate_from_pool(CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool pool, CUstream stream) noexcept {
  const auto call = [&] { return table().memory_allocate_from_pool.get<kPerThread>()(pointer, bytes, pool, stream); };
  return noted(allocate_or_again(call), pointer, bytes);
}

CUresult reserve(CUdeviceptr* pointer, std::size_t bytes, std::size_t alignment, CUdeviceptr address,
                 unsigned long long flags) noexcept {
  return noted(table().memory_reserve(pointer, bytes, alignment, address, flags), pointer, bytes);
}

CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp* properties,
                unsigned long long flags) noexcept {
  return allocate_or_again([&] { return table().memory_create(handle, bytes, properties, flags); });
}

CUresult create_array(CUarray* array, const CUDA_ARRAY_DESCRIPTOR* description) noexcept {
  return allocate_or_again([&] { return table().array_create(array, description); });
}

CUresult create_array_3d(CUarray* array, const CUDA_ARRAY3D_DESCRIPTOR* description) noexcept {
  return allocate_or_again([&] { return table().array_3d_create(array, description); });
}

CUresult create_mipmapped_array(CUmipmappedArray* array, const CUDA_ARRAY3D_DESCRIPTOR* description,
                                unsigned levels) noexcept {
  return allocate_or_again([&] { return table().mipmapped_array_create(array, description, levels); });
}

CUresult open_ipc(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) noexcept {
  return noted(table().memory_open_ipc(pointer, handle, flags), pointer, 1);
}

CUresult module_get_global(CUdeviceptr* pointer, std::size_t* bytes, CUmodule module, const char* name) noexcept {
  return noted(table().module_get_global(pointer, bytes, module, name), pointer, 1);
}

CUresult library_get_global(CUdeviceptr* pointer, std::size_t* bytes, CUlibrary library, const char* name) noexcept {
  return noted(table().library_get_global(pointer, bytes, library, name), pointer, 1);
}

CUresult module_unload(CUmodule module) noexcept {
  const runtime::Slices::Unloading unloading(runtime::engine().slices());
  const driver::Functions::Ending forgotten(module);
  return table().module_unload(module);
}

CUresult library_unload(CUlibrary library) noexcept {
  const runtime::Slices::Unloading unloading(runtime::engine().slices());
  const driver::Functions::Ending forgotten(library);
  return table().library_unload(library);
}

}  // namespace

std::span<const TakenOver> memory_functions() noexcept {
  static const std::array points{
      TakenOver{"cuMemAlloc_v2", address(&allocate)},
      TakenOver{"cuMemAllocPitch_v2", address(&allocate_pitch)},
      TakenOver{"cuMemAllocManaged", address(&allocate_managed)},
      TakenOver{"cuMemAllocHost_v2", address(&allocate_host)},
      TakenOver{"cuMemHostAlloc", address(&host_allocate)},
      TakenOver{"cuMemHostRegister_v2", address(&host_register)},
      TakenOver{"cuMemAllocAsync", address(&allocate_async<false>), address(&allocate_async<true>)},
      TakenOver{"cuMemAllocFromPoolAsync", address(&allocate_from_pool<false>), address(&allocate_from_pool<true>)},
      TakenOver{"cuMemAddressReserve", address(&reserve)},
      TakenOver{"cuMemCreate", address(&create)},
      TakenOver{"cuArrayCreate_v2", address(&create_array)},
      TakenOver{"cuArray3DCreate_v2", address(&create_array_3d)},
      TakenOver{"cuMipmappedArrayCreate", address(&create_mipmapped_array)},
      TakenOver{"cuIpcOpenMemHandle_v2", address(&open_ipc)},
      TakenOver{"cuModuleGetGlobal_v2", address(&module_get_global)},
      TakenOver{"cuLibraryGetGlobal", address(&library_get_global)},
      TakenOver{"cuModuleUnload", address(&module_unload)},
      TakenOver{"cuLibraryUnload", address(&library_unload)},
  };
  return points;
}

}  // namespace cudasched::hook
