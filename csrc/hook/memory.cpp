// Calls that make memory known to CUDA. Each goes to the driver, is then noted and counted against the limit, and tried
// again when others have given memory back (runtime/memory). And calls that free memory, or end handles of kernels:
// those are forgotten first.
#include "hook/memory.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "base/log.hpp"
#include "driver/barrier.hpp"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "driver/registry.hpp"
#include "hook/deferred.hpp"
#include "hook/engine_calls.hpp"
#include "hook/taken_over.hpp"
#include "runtime/engine.hpp"
#include "runtime/memory/memory.hpp"

namespace cudasched::hook {
namespace {

using driver::table;
using runtime::Holdings;

Holdings& holdings() noexcept { return runtime::memory().holdings; }

// Memory whose free is queued is not free yet: before a program hears that there is none, everything queued is
// submitted.
template <typename Allocate>
CUresult allocate_or_again(Allocate&& allocate) noexcept {
  const CUresult status = allocate();
  return status == CUDA_ERROR_OUT_OF_MEMORY && submit_everything() ? allocate() : status;
}

// Where an allocation counts: the device, -1 for none, and the class of the thread that asks.
struct AllocationSite {
  int device = -1;
  Class client_class = Class::kNormal;
  const void* context = nullptr;

  Holdings::Held of(std::uint64_t bytes) const noexcept { return {bytes, device, client_class, context}; }
};

AllocationSite asked_on(int device) noexcept {
  AllocationSite asked{device, runtime::Memory::class_of_thread()};
  CUcontext context = nullptr;
  if (table().cuCtxGetCurrent(&context) == CUDA_SUCCESS) asked.context = context;
  return asked;
}

AllocationSite asked_here() noexcept { return asked_on(driver::current_device()); }

// Before a latency client's program gets out-of-memory, other processes are asked for their cached memory; a
// best-effort program waits for its turn. Where that did not help, a message lists each client's memory.
template <typename Allocate>
CUresult allocate_or_ask(const AllocationSite& asked, std::uint64_t bytes, Allocate&& allocate) noexcept {
  driver::barrier().settle();  // or a wait here would keep this program from being parked
  runtime::memory().yield(asked.device, asked.client_class);
  CUresult status = allocate_or_again(allocate);
  if (status != CUDA_ERROR_OUT_OF_MEMORY || asked.device < 0) return status;
  std::string unanswered;
  if (asked.client_class == Class::kLatency) {
    runtime::MemoryRequest request(asked.device, bytes);
    while (status == CUDA_ERROR_OUT_OF_MEMORY && request.next()) status = allocate();
    if (status == CUDA_ERROR_OUT_OF_MEMORY) unanswered = request.unanswered();
  } else if (asked.client_class == Class::kBestEffort) {
    runtime::MemoryTurn turn(asked.device, bytes);
    while (status == CUDA_ERROR_OUT_OF_MEMORY && turn.next()) status = allocate();
  }
  if (status == CUDA_ERROR_OUT_OF_MEMORY) {
    runtime::memory().report_failure(asked.device, asked.client_class, bytes, unanswered);
  }
  return status;
}

// Within the limit? Pools have given memory back to the GPU that no call of the program's told of.
bool reserve_for(const AllocationSite& asked, std::uint64_t bytes) noexcept {
  if (holdings().limit() != 0) runtime::memory().refresh_pools(asked.device);
  return holdings().reserve(asked.device, bytes, runtime::memory().room(asked.device));
}

// With the limit. The bytes count as held from before the call; done() notes the allocation.
template <typename Allocate, typename Done>
CUresult allocate_counted(const AllocationSite& asked, std::uint64_t bytes, Allocate&& allocate, Done&& done) noexcept {
  if (!reserve_for(asked, bytes)) {
    runtime::memory().report_limit(asked.device, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const CUresult status = allocate_or_ask(asked, bytes, allocate);
  if (status == CUDA_SUCCESS) {
    done();
  } else {
    holdings().give_up(asked.device, bytes);
  }
  runtime::memory().publish(asked.device);
  return status;
}

template <typename Handle>
std::uint64_t word_of(Handle handle) noexcept {
  return (std::uint64_t)handle;  // a CUdeviceptr or a pointer
}

template <typename Pointer>
CUresult noted(CUresult status, const Pointer* pointer, std::size_t bytes) noexcept {
  if (status == CUDA_SUCCESS && pointer != nullptr) runtime::engine().note_memory(word_of(*pointer), bytes);
  return status;
}

// Memory that is allocated under an address or a handle of its own, and freed by that.
template <typename Handle, typename Allocate>
CUresult allocate_held(Handle* handle, std::uint64_t bytes, Allocate&& allocate) noexcept {
  const AllocationSite asked = asked_here();
  return allocate_counted(asked, bytes, allocate, [&] {
    if (handle != nullptr) holdings().hold(word_of(*handle), asked.of(bytes));
  });
}

template <typename Handle, typename Free>
CUresult free_held(Handle handle, Free&& free) noexcept {
  const Holdings::Held held = holdings().forget(word_of(handle));
  const CUresult status = free();
  if (held.device < 0) return status;
  if (status == CUDA_SUCCESS) {
    holdings().is_gone(held);
  } else {
    holdings().put_back(word_of(handle), held);
  }
  runtime::memory().publish(held.device);
  return status;
}

runtime::Pageable& pageable() noexcept { return runtime::memory().pageable; }

CUresult allocate(CUdeviceptr* pointer, std::size_t bytes) noexcept {
  const auto plain_or_pageable = [&] {
    return driver::crossed([&] {
      const std::optional<CUresult> status = pageable().allocate(pointer, bytes);
      return status ? *status : table().cuMemAlloc(pointer, bytes);
    });
  };
  const CUresult status = allocate_held(pointer, bytes, [&] {
    const CUresult first = plain_or_pageable();
    return first == CUDA_ERROR_OUT_OF_MEMORY && carry_out_late_frees() ? plain_or_pageable() : first;
  });
  return noted(status, pointer, bytes);
}

// The driver decides the rows' width: the requested width counts until they are there.
CUresult allocate_pitch(CUdeviceptr* pointer, std::size_t* pitch, std::size_t width_bytes, std::size_t height,
                        unsigned element_bytes) noexcept {
  const AllocationSite asked = asked_here();
  const std::size_t bytes = width_bytes * height;
  const auto real_bytes = [&] { return pitch != nullptr ? std::max(bytes, *pitch * height) : bytes; };
  const CUresult status = allocate_counted(
      asked, bytes, [&] { return table().cuMemAllocPitch(pointer, pitch, width_bytes, height, element_bytes); },
      [&] {
        if (!holdings().reserve(asked.device, real_bytes() - bytes)) {
          holdings().hold(word_of(*pointer), asked.of(bytes));  // by less than a row's padding over the limit
        } else {
          holdings().hold(word_of(*pointer), asked.of(real_bytes()));
        }
      });
  return noted(status, pointer, status == CUDA_SUCCESS ? real_bytes() : 0);
}

CUresult allocate_managed(CUdeviceptr* pointer, std::size_t bytes, unsigned flags) noexcept {
  driver::barrier().pin();
  return noted(allocate_held(pointer, bytes, [&] { return table().cuMemAllocManaged(pointer, bytes, flags); }), pointer,
               bytes);
}

CUresult allocate_host(void** pointer, std::size_t bytes) noexcept {
  return noted(allocate_or_again([&] { return table().cuMemAllocHost(pointer, bytes); }), pointer, bytes);
}

CUresult host_allocate(void** pointer, std::size_t bytes, unsigned flags) noexcept {
  return noted(allocate_or_again([&] { return table().cuMemHostAlloc(pointer, bytes, flags); }), pointer, bytes);
}

CUresult host_register(void* pointer, std::size_t bytes, unsigned flags) noexcept {
  return noted(allocate_or_again([&] { return table().cuMemHostRegister(pointer, bytes, flags); }), &pointer, bytes);
}

CUresult free_memory(CUdeviceptr pointer) noexcept {
  return free_held(pointer, [&] { return pageable().free(pointer) ? CUDA_SUCCESS : table().cuMemFree(pointer); });
}

// ---- pools: the pool's memory from the device counts

cuuint64_t pool_bytes(CUmemoryPool pool, CUmemPool_attribute attribute) noexcept {
  cuuint64_t bytes = 0;
  auto* const get = table().cuMemPoolGetAttribute;
  return get != nullptr && get(pool, attribute, &bytes) == CUDA_SUCCESS ? bytes : 0;
}

void hold_pool(const AllocationSite& asked, CUmemoryPool pool) noexcept {
  holdings().hold_pool(word_of(pool), asked.device, asked.client_class,
                       pool_bytes(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
}

int device_of(CUstream stream) noexcept {
  if (stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) {
    return driver::current_device();
  }
  driver::StreamFacts facts;
  return driver::registry().look_up(stream, facts) && facts.device >= 0 ? facts.device : driver::current_device();
}

// A pool takes memory from the device as necessary, in amounts of its own choice. So the missing bytes are checked
// against the limit before, and the pool's real size afterwards.
template <bool kPerThread, typename Allocate>
CUresult allocate_of_pool(CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool pool, CUstream stream,
                          Allocate&& allocate) noexcept {
  const CUstream meant = driver::meant_stream<kPerThread>(stream);
  // An allocation node of a graph has its memory from another place, when the graph is launched.
  if (runtime::is_captured(meant)) return noted(allocate_or_again(allocate), pointer, bytes);
  AllocationSite asked = asked_on(device_of(meant));
  if (pool == nullptr && (table().cuDeviceGetMemPool == nullptr || asked.device < 0 ||
                          table().cuDeviceGetMemPool(&pool, asked.device) != CUDA_SUCCESS)) {
    pool = nullptr;
  }
  if (pool == nullptr) return noted(allocate_or_ask(asked, bytes, allocate), pointer, bytes);
  const int of_pool = holdings().device_of_pool(word_of(pool));
  if (of_pool == Holdings::kOnHost) return noted(allocate_or_again(allocate), pointer, bytes);
  if (of_pool >= 0) asked.device = of_pool;
  std::uint64_t lacks = bytes;
  const std::uint64_t limit = holdings().limit();  // another process may change it meanwhile
  if (limit != 0) {
    hold_pool(asked, pool);
    const std::uint64_t has = pool_bytes(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
    const std::uint64_t used = pool_bytes(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    const std::uint64_t free = has > used ? has - used : 0;
    lacks = bytes > free ? bytes - free : 0;
    if (!reserve_for(asked, lacks)) {
      runtime::memory().report_limit(asked.device, bytes);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  CUresult status = allocate_or_ask(asked, bytes, allocate);
  if (limit != 0) holdings().give_up(asked.device, lacks);
  if (status == CUDA_SUCCESS) {
    hold_pool(asked, pool);
    auto* const free_again = table().cuMemFreeAsync.template get<kPerThread>();
    if (limit != 0 && lacks != 0 && holdings().there(asked.device) > limit && free_again != nullptr) {
      free_again(*pointer, stream);
      runtime::memory().report_limit(asked.device, bytes);
      status = CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  runtime::memory().publish(asked.device);
  return noted(status, pointer, bytes);
}

template <bool kPerThread>
CUresult allocate_async(CUdeviceptr* pointer, std::size_t bytes, CUstream stream) noexcept {
  return allocate_of_pool<kPerThread>(pointer, bytes, nullptr, stream, [&] {
    return table().cuMemAllocAsync.get<kPerThread>()(pointer, bytes, stream);
  });
}

template <bool kPerThread>
CUresult allocate_from_pool(CUdeviceptr* pointer, std::size_t bytes, CUmemoryPool pool, CUstream stream) noexcept {
  return allocate_of_pool<kPerThread>(pointer, bytes, pool, stream, [&] {
    return table().cuMemAllocFromPoolAsync.get<kPerThread>()(pointer, bytes, pool, stream);
  });
}

CUresult create_pool(CUmemoryPool* pool, const CUmemPoolProps* properties) noexcept {
  const CUresult status = table().cuMemPoolCreate(pool, properties);
  if (status == CUDA_SUCCESS) {
    const CUmemLocation& place = properties->location;
    holdings().hold_pool(word_of(*pool), place.type == CU_MEM_LOCATION_TYPE_DEVICE ? place.id : Holdings::kOnHost,
                         runtime::Memory::class_of_thread(), 0);
  }
  return status;
}

CUresult destroy_pool(CUmemoryPool pool) noexcept {
  const int device = holdings().device_of_pool(word_of(pool));
  const CUresult status = table().cuMemPoolDestroy(pool);
  if (status == CUDA_SUCCESS) holdings().forget_pool(word_of(pool));
  runtime::memory().publish(device);
  return status;
}

CUresult trim_pool(CUmemoryPool pool, std::size_t keep_bytes) noexcept {
  const CUresult status = table().cuMemPoolTrimTo(pool, keep_bytes);
  const int device = holdings().device_of_pool(word_of(pool));
  if (device >= 0) {
    hold_pool({device, runtime::Memory::class_of_thread()}, pool);
    runtime::memory().publish(device);
  }
  return status;
}

// ---- physical memory, and the addresses that it is mapped at

CUresult reserve(CUdeviceptr* pointer, std::size_t bytes, std::size_t alignment, CUdeviceptr address,
                 unsigned long long flags) noexcept {
  return noted(table().cuMemAddressReserve(pointer, bytes, alignment, address, flags), pointer, bytes);
}

CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp* properties,
                unsigned long long flags) noexcept {
  const auto call = [&] { return table().cuMemCreate(handle, bytes, properties, flags); };
  if (properties == nullptr || properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return allocate_or_again(call);
  AllocationSite asked{properties->location.id, runtime::Memory::class_of_thread()};
  return allocate_counted(asked, bytes, call, [&] { holdings().hold_physical(*handle, asked.of(bytes)); });
}

CUresult retain_physical(CUmemGenericAllocationHandle* handle, void* address) noexcept {
  driver::barrier().pin();
  const CUresult status = driver::crossed([&] { return table().cuMemRetainAllocationHandle(handle, address); });
  if (status == CUDA_SUCCESS) holdings().retain_physical(*handle);
  return status;
}

CUresult release_physical(CUmemGenericAllocationHandle handle) noexcept {
  const Holdings::Released released = holdings().release_physical(handle);
  const CUresult status = table().cuMemRelease(handle);
  if (status != CUDA_SUCCESS) holdings().put_back(released);
  if (status == CUDA_SUCCESS) holdings().is_gone(released);
  runtime::memory().publish(released.held.device);
  return status;
}

CUresult map_physical(CUdeviceptr address, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags) noexcept {
  const CUresult status = table().cuMemMap(address, bytes, offset, handle, flags);
  if (status == CUDA_SUCCESS) holdings().map_physical(address, bytes, handle);
  return status;
}

CUresult unmap_physical(CUdeviceptr address, std::size_t bytes) noexcept {
  const Holdings::Unmapped unmapped = holdings().unmap_physical(address, bytes);
  const CUresult status = table().cuMemUnmap(address, bytes);
  if (status != CUDA_SUCCESS) {
    holdings().put_back(unmapped);
    return status;
  }
  runtime::memory().publish(holdings().is_gone(unmapped));
  return status;
}

// ---- arrays

std::uint64_t element_bytes(CUarray_format format) noexcept {
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
      return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
      return 2;
    default:  // and those of blocks of texels, which are smaller
      return 4;
  }
}

std::uint64_t array_bytes(std::uint64_t width, std::uint64_t height, std::uint64_t depth, unsigned channels,
                          CUarray_format format) noexcept {
  return width * std::max<std::uint64_t>(height, 1) * std::max<std::uint64_t>(depth, 1) * channels *
         element_bytes(format);
}

// A sparse or deferred array has no memory before its mapping, which counts as physical memory.
std::uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR* description, unsigned level) noexcept {
  constexpr unsigned kWithoutMemory = CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING;
  if (description == nullptr || (description->Flags & kWithoutMemory) != 0) return 0;
  return array_bytes(
      std::max<std::uint64_t>(description->Width >> level, 1), description->Height >> level,
      (description->Flags & CUDA_ARRAY3D_LAYERED) != 0 ? description->Depth : description->Depth >> level,
      description->NumChannels, description->Format);
}

CUresult create_array(CUarray* array, const CUDA_ARRAY_DESCRIPTOR* description) noexcept {
  const std::uint64_t bytes = description == nullptr ? 0
                                                     : array_bytes(description->Width, description->Height, 1,
                                                                   description->NumChannels, description->Format);
  return allocate_held(array, bytes, [&] { return table().cuArrayCreate(array, description); });
}

CUresult create_array_3d(CUarray* array, const CUDA_ARRAY3D_DESCRIPTOR* description) noexcept {
  return allocate_held(array, array_bytes(description, 0), [&] { return table().cuArray3DCreate(array, description); });
}

CUresult create_mipmapped_array(CUmipmappedArray* array, const CUDA_ARRAY3D_DESCRIPTOR* description,
                                unsigned levels) noexcept {
  std::uint64_t bytes = 0;
  for (unsigned level = 0; level < std::min(levels, 32U); ++level) bytes += array_bytes(description, level);
  return allocate_held(array, bytes, [&] { return table().cuMipmappedArrayCreate(array, description, levels); });
}

CUresult destroy_array(CUarray array) noexcept {
  return free_held(array, [&] { return table().cuArrayDestroy(array); });
}

CUresult destroy_mipmapped_array(CUmipmappedArray array) noexcept {
  return free_held(array, [&] { return table().cuMipmappedArrayDestroy(array); });
}

// ---- answers to programs

// Under a limit, the limit is the GPU's size, and the program's memory is the used part. Where the host
// shares the GPU's memory, the host's use counts, too. The first versions have 32 bits.
template <typename Size>
CUresult within_limit(CUresult status, Size* free, Size* total) noexcept {
  const std::uint64_t limit = holdings().limit();
  if (status != CUDA_SUCCESS || limit == 0) return status;
  const int device = driver::current_device();
  runtime::memory().refresh_pools(device);
  const std::uint64_t held = holdings().held(device);
  const std::uint64_t left = std::min(limit > held ? limit - held : 0, runtime::memory().room(device));
  *free = static_cast<Size>(std::min<std::uint64_t>(*free, left));
  *total = static_cast<Size>(std::min<std::uint64_t>(*total, limit));
  return status;
}

CUresult get_info(std::size_t* free, std::size_t* total) noexcept {
  return within_limit(table().cuMemGetInfo(free, total), free, total);
}

CUresult get_info_v1(unsigned* free, unsigned* total) noexcept {
  return within_limit(table().cuMemGetInfo_v1(free, total), free, total);
}

// Programs size their caches by this: PyTorch's fractions, caches of servers.
template <typename Size>
CUresult within_limit(CUresult status, Size* bytes) noexcept {
  const std::uint64_t limit = holdings().limit();
  if (status == CUDA_SUCCESS && limit != 0) *bytes = static_cast<Size>(std::min<std::uint64_t>(*bytes, limit));
  return status;
}

CUresult total_memory(std::size_t* bytes, CUdevice device) noexcept {
  return within_limit(table().cuDeviceTotalMem(bytes, device), bytes);
}

CUresult total_memory_v1(unsigned* bytes, CUdevice device) noexcept {
  return within_limit(table().cuDeviceTotalMem_v1(bytes, device), bytes);
}

// The driver knows the chunks of pageable memory, and the program one allocation.
CUresult get_address_range(CUdeviceptr* begin, std::size_t* bytes, CUdeviceptr pointer) noexcept {
  const auto block = pageable().find(pointer);
  if (!block) return table().cuMemGetAddressRange(begin, bytes, pointer);
  if (begin != nullptr) *begin = block->begin;
  if (bytes != nullptr) *bytes = block->bytes;
  return CUDA_SUCCESS;
}

// True: answered.
bool attribute_of(const runtime::Pageable::Block& block, CUpointer_attribute attribute, void* data) noexcept {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      std::memcpy(data, &block.begin, sizeof block.begin);
      return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      std::memcpy(data, &block.bytes, sizeof block.bytes);
      return true;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      std::memcpy(data, &block.context, sizeof block.context);
      return true;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:  // of its first chunk
      return driver::crossed([&] { return table().cuPointerGetAttribute(data, attribute, block.begin); }) ==
             CUDA_SUCCESS;
    default:
      return false;
  }
}

CUresult get_attribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) noexcept {
  const auto block = pageable().find(pointer);
  if (block && data != nullptr && attribute_of(*block, attribute, data)) return CUDA_SUCCESS;
  const auto ask = [&] { return table().cuPointerGetAttribute(data, attribute, pointer); };
  return block ? driver::crossed(ask) : ask();
}

CUresult get_attributes(unsigned count, CUpointer_attribute* attributes, void** data, CUdeviceptr pointer) noexcept {
  const auto block = pageable().find(pointer);
  const auto ask = [&] { return table().cuPointerGetAttributes(count, attributes, data, pointer); };
  const CUresult status = block ? driver::crossed(ask) : ask();
  for (unsigned i = 0; status == CUDA_SUCCESS && block && i < count; ++i) attribute_of(*block, attributes[i], data[i]);
  return status;
}

// Memory for other processes is plain from here on.
CUresult get_ipc(CUipcMemHandle* handle, CUdeviceptr pointer) noexcept {
  pageable().stop();
  driver::barrier().pin();
  if (pageable().find(pointer)) {
    log::error(
        "memory that was allocated with pageable = true cannot be given to other processes: set pageable = false");
  }
  return driver::crossed([&] { return table().cuIpcGetMemHandle(handle, pointer); });
}

CUresult open_ipc(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) noexcept {
  return noted(table().cuIpcOpenMemHandle(pointer, handle, flags), pointer, 1);
}

CUresult module_get_global(CUdeviceptr* pointer, std::size_t* bytes, CUmodule module, const char* name) noexcept {
  return noted(table().cuModuleGetGlobal(pointer, bytes, module, name), pointer, 1);
}

CUresult library_get_global(CUdeviceptr* pointer, std::size_t* bytes, CUlibrary library, const char* name) noexcept {
  return noted(table().cuLibraryGetGlobal(pointer, bytes, library, name), pointer, 1);
}

// Traces ask for the origin of a kernel's code. The address is noted here, and its library is found later, because the
// loader's lock must not be taken here: a constructor that holds that lock may load code, too.
template <typename Module>
CUresult loaded(CUresult status, Module* const* module, const void* image) noexcept {
  if (status == CUDA_SUCCESS && module != nullptr) driver::functions().loaded(handle_word(*module), image);
  return status;
}

CUresult module_load_data(CUmodule* module, const void* image) noexcept {
  return loaded(table().cuModuleLoadData(module, image), module, image);
}

CUresult module_load_data_ex(CUmodule* module, const void* image, unsigned count, CUjit_option* options,
                             void** values) noexcept {
  return loaded(table().cuModuleLoadDataEx(module, image, count, options, values), module, image);
}

CUresult module_load_fat_binary(CUmodule* module, const void* image) noexcept {
  return loaded(table().cuModuleLoadFatBinary(module, image), module, image);
}

CUresult library_load_data(CUlibrary* library, const void* image, CUjit_option* jit_options, void** jit_values,
                           unsigned jit_count, CUlibraryOption* options, void** values, unsigned count) noexcept {
  const CUresult status =
      table().cuLibraryLoadData(library, image, jit_options, jit_values, jit_count, options, values, count);
  return loaded(status, library, image);
}

CUresult library_get_kernel(CUkernel* kernel, CUlibrary library, const char* name) noexcept {
  const CUresult status = table().cuLibraryGetKernel(kernel, library, name);
  if (status == CUDA_SUCCESS && kernel != nullptr) driver::functions().given_as_kernel(*kernel);
  return status;
}

CUresult module_unload(CUmodule module) noexcept {
  const runtime::Slices::Unloading unloading(runtime::engine().slices(), &submit_everything);
  const driver::Functions::Ending forgotten(module);
  return table().cuModuleUnload(module);
}

CUresult library_unload(CUlibrary library) noexcept {
  const runtime::Slices::Unloading unloading(runtime::engine().slices(), &submit_everything);
  const driver::Functions::Ending forgotten(library);
  return table().cuLibraryUnload(library);
}

}  // namespace

CUresult free_counted(CUdeviceptr address, CUstream stream, CUresult (*free)(CUdeviceptr, CUstream) noexcept) noexcept {
  return free_held(address, [&] { return pageable().free_later(address) ? CUDA_SUCCESS : free(address, stream); });
}

bool carry_out_late_frees() noexcept {
  if (!pageable().owes()) return false;
  submit_everything();
  return pageable().free_late();
}

std::span<const TakenOver> memory_functions() noexcept {
  static const TakenOver points[] = {
      {"cuMemAlloc_v2", &allocate},
      {"cuMemAllocPitch_v2", &allocate_pitch},
      {"cuMemAllocManaged", &allocate_managed},
      {"cuMemAllocHost_v2", &allocate_host},
      {"cuMemHostAlloc", &host_allocate},
      {"cuMemHostRegister_v2", &host_register},
      {"cuMemAllocAsync", &allocate_async<false>, &allocate_async<true>},
      {"cuMemAllocFromPoolAsync", &allocate_from_pool<false>, &allocate_from_pool<true>},
      {"cuMemAddressReserve", &reserve},
      {"cuMemCreate", &create},
      {"cuMemFree_v2", &free_memory},
      {"cuMemRetainAllocationHandle", &retain_physical},
      {"cuMemRelease", &release_physical},
      {"cuMemMap", &map_physical},
      {"cuMemUnmap", &unmap_physical},
      {"cuMemPoolCreate", &create_pool},
      {"cuMemPoolDestroy", &destroy_pool},
      {"cuMemPoolTrimTo", &trim_pool},
      {"cuArrayDestroy", &destroy_array},
      {"cuMipmappedArrayDestroy", &destroy_mipmapped_array},
      {"cuMemGetInfo", &get_info_v1},
      {"cuMemGetInfo_v2", &get_info},
      {"cuDeviceTotalMem", &total_memory_v1},
      {"cuDeviceTotalMem_v2", &total_memory},
      {"cuArrayCreate_v2", &create_array},
      {"cuArray3DCreate_v2", &create_array_3d},
      {"cuMipmappedArrayCreate", &create_mipmapped_array},
      {"cuMemGetAddressRange_v2", &get_address_range},
      {"cuPointerGetAttribute", &get_attribute},
      {"cuPointerGetAttributes", &get_attributes},
      {"cuIpcGetMemHandle", &get_ipc},
      {"cuIpcOpenMemHandle_v2", &open_ipc},
      {"cuModuleGetGlobal_v2", &module_get_global},
      {"cuLibraryGetGlobal", &library_get_global},
      {"cuModuleLoadData", &module_load_data},
      {"cuModuleLoadDataEx", &module_load_data_ex},
      {"cuModuleLoadFatBinary", &module_load_fat_binary},
      {"cuLibraryLoadData", &library_load_data},
      {"cuLibraryGetKernel", &library_get_kernel},
      {"cuModuleUnload", &module_unload},
      {"cuLibraryUnload", &library_unload},
  };
  return points;
}

}  // namespace cudasched::hook
