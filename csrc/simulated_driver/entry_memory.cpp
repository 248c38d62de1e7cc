// Entry points: memory. Device memory is host memory; copies and memsets are operations like kernels.
#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "simulated_driver/capture.hpp"
#include "simulated_driver/driver.hpp"
#include "simulated_driver/node_params.hpp"

namespace cudasched::simulated_driver {
namespace {

enum class Side { kDevice, kHost, kEither };

// kEither: by the address; pageable memory if it is not ours. Is it pageable?
bool check_side(CopySide& copied, std::size_t bytes, Side side) {
  const std::uintptr_t address = copied.address;
  const bool pageable = find_allocation(address, bytes) == nullptr;
  describe_side(copied);
  require(address != 0 && (side != Side::kDevice || !pageable));
  // An address inside an allocation from which too few bytes are left is an error on any side.
  require(!pageable || find_allocation(address, 1) == nullptr);
  return pageable;
}

// For calls that wait for the stream.
void refuse_waiting(const Stream& stream) {
  refuse_capturing(stream);
  refuse_in_capture();
}

CUresult copy(CUstream handle, std::uintptr_t destination, Side to, std::uintptr_t source, Side from, std::size_t bytes,
              bool synchronous) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    if (bytes == 0) return;
    CopyCommand command;
    command.destination.address = destination;
    command.source.address = source;
    command.bytes = bytes;
    const bool pageable_destination = check_side(command.destination, bytes, to);
    const bool pageable_source = check_side(command.source, bytes, from);
    refuse_implicit(*stream);
    if (synchronous) refuse_waiting(*stream);
    if (stream->capture) return capture_command(*stream, CU_GRAPH_NODE_TYPE_MEMCPY, std::move(command), 0);
    if (pageable_source) {
      const auto* const first = reinterpret_cast<const std::uint8_t*>(source);
      command.staged = std::make_shared<const std::vector<std::uint8_t>>(first, first + bytes);
    }
    submit_command(lock, stream, std::move(command));
    if (synchronous || pageable_destination) synchronize_stream(lock, stream);
  });
}

// Rows and slices; waits for them.
CUresult copy_rows(CUstream handle, const CUDA_MEMCPY3D* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    Command command = read_params(*params);
    refuse_implicit(*stream);
    refuse_waiting(*stream);
    submit_command(lock, stream, std::move(command));
    synchronize_stream(lock, stream);
  });
}

CUresult copy_rows(CUstream handle, const CUDA_MEMCPY2D* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_MEMCPY3D all{};
  all.srcXInBytes = params->srcXInBytes;
  all.srcY = params->srcY;
  all.srcMemoryType = params->srcMemoryType;
  all.srcHost = params->srcHost;
  all.srcDevice = params->srcDevice;
  all.srcPitch = params->srcPitch;
  all.dstXInBytes = params->dstXInBytes;
  all.dstY = params->dstY;
  all.dstMemoryType = params->dstMemoryType;
  all.dstHost = params->dstHost;
  all.dstDevice = params->dstDevice;
  all.dstPitch = params->dstPitch;
  all.WidthInBytes = params->WidthInBytes;
  all.Height = params->Height;
  all.Depth = 1;
  return copy_rows(handle, &all);
}

std::uintptr_t address_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

CUresult set(CUstream handle, CUdeviceptr destination, std::uint32_t value, std::uint32_t width_bytes,
             std::size_t count) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    if (count == 0) return;
    require(count <= kLargestBytes && destination % width_bytes == 0 &&
            find_allocation(destination, count * width_bytes) != nullptr);
    refuse_implicit(*stream);
    SetCommand command;
    command.destination = destination;
    command.value = value;
    command.width_bytes = width_bytes;
    command.count = count;
    command.context = find_allocation(destination, 1)->context.get();
    if (stream->capture) return capture_command(*stream, CU_GRAPH_NODE_TYPE_MEMSET, command, 0);
    submit_command(lock, stream, command);
  });
}

// Allocation calls that capture forbids.
std::uintptr_t allocate_now(std::size_t bytes, CUmemorytype type, unsigned flags) {
  const std::shared_ptr<Context> context = current_context();
  refuse_in_capture();
  return allocate(context, bytes, type, flags);
}

// As cudaFree does: all work of the context is done first.
CUresult free_now(std::uintptr_t address, CUmemorytype type) {
  if (address == 0) return may_call();
  return with_driver([&](Lock& lock) {
    current_context();
    const auto ours = [&]() -> const Allocation& {
      const Allocation& allocation = find(driver().allocations, address, CUDA_ERROR_INVALID_VALUE);
      require(allocation.type == type && !allocation.mapped);
      return allocation;
    };
    const std::shared_ptr<Context> owner = ours().context;
    refuse_in_capture();
    synchronize_context(lock, owner);
    if (GraphMemory* const of_graph = ours().graph_memory; of_graph != nullptr) {
      require(std::exchange(of_graph->live, false));
    } else {
      release_memory(address);
    }
  });
}

}  // namespace
}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const int device = current_context()->device;
    *total = gpu(device).shared.memory_bytes();
    *free = free_device_memory(device);
  });
}

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  return give(pointer, [&] { return allocate_now(bytes, CU_MEMORYTYPE_DEVICE, 0); });
}

CUresult cuMemFree_v2(CUdeviceptr pointer) { return free_now(pointer, CU_MEMORYTYPE_DEVICE); }
CUresult cuMemAllocHost_v2(void** pointer, size_t bytes) { return cuMemHostAlloc(pointer, bytes, 0); }

CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  constexpr unsigned kKnown = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
  if ((flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  return give(pointer, [&] { return reinterpret_cast<void*>(allocate_now(bytes, CU_MEMORYTYPE_HOST, flags)); });
}

CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned flags) {
  if (pointer == nullptr || bytes == 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const auto context = current_context();
    require(find_allocation(address_of(pointer), 1) == nullptr, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    Allocation made{.bytes = bytes, .type = CU_MEMORYTYPE_HOST, .context = context};
    made.mapped = true;  // the program's own
    driver().allocations.emplace(address_of(pointer), made);
  });
}

CUresult cuMemHostUnregister(void* pointer) {
  return with_driver([&](Lock& lock) {
    const auto context = current_context();
    const auto found = driver().allocations.find(address_of(pointer));
    require(found != driver().allocations.end() && found->second.type == CU_MEMORYTYPE_HOST && found->second.mapped,
            CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    synchronize_context(lock, context);
    driver().allocations.erase(address_of(pointer));
  });
}

CUresult cuMemFreeHost(void* pointer) { return free_now(address_of(pointer), CU_MEMORYTYPE_HOST); }

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* pointer, unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return give(device, [&] {
    current_context();
    const Allocation* const allocation = find_allocation(address_of(pointer), 1);
    require(allocation != nullptr && allocation->type == CU_MEMORYTYPE_HOST);
    return address_of(pointer);
  });
}

CUresult cuMemAllocAsync(CUdeviceptr* pointer, size_t bytes, CUstream handle) {
  if (pointer == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    refuse_implicit(*stream);
    if (stream->capture) {
      auto node = make_allocation_node(stream->context, bytes);
      *pointer = std::get<GraphMemoryCommand>(node->command).memory->address;
      capture_node(*stream, std::move(node));
      return;
    }
    const auto allocate_here = [&] { return allocate(stream->context, bytes, CU_MEMORYTYPE_DEVICE, 0); };
    std::uintptr_t address = 0;
    try {
      address = allocate_here();
    } catch (const Refused& refused) {
      if (refused.result != CUDA_ERROR_OUT_OF_MEMORY) throw;
      // The driver gives out memory that the stream freed before; here that is free once the stream has done the free.
      synchronize_stream(lock, stream);
      address = allocate_here();
    }
    driver().allocations.at(address).of_pool = true;
    try {
      submit_command(lock, stream, {});
    } catch (const Refused&) {
      release_memory(address);
      throw;
    }
    *pointer = address;
  });
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr* pointer, size_t bytes, CUstream stream) {
  return cuMemAllocAsync(pointer, bytes, per_thread(stream));
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Stream> stream = find_stream(handle);
    refuse_implicit(*stream);
    if (pointer == 0) return;
    const Allocation& allocation = find(driver().allocations, pointer, CUDA_ERROR_INVALID_VALUE);
    require(allocation.type == CU_MEMORYTYPE_DEVICE && !allocation.mapped);
    GraphMemory* const of_graph = allocation.graph_memory;
    if (stream->capture) {
      require(of_graph != nullptr);
      return capture_command(*stream, CU_GRAPH_NODE_TYPE_MEM_FREE, GraphMemoryCommand{of_graph->shared_from_this()}, 0);
    }
    if (of_graph == nullptr) return submit_command(lock, stream, FreeCommand{pointer});
    require(std::exchange(of_graph->live, false));
    submit_command(lock, stream, {});
  });
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
  return cuMemFreeAsync(pointer, per_thread(stream));
}

CUresult cuMemAllocPitch_v2(CUdeviceptr* pointer, size_t* pitch, size_t width_bytes, size_t height, unsigned) {
  if (pointer == nullptr || pitch == nullptr) return CUDA_ERROR_INVALID_VALUE;
  constexpr std::size_t kPitch = 512;
  if (std::max(width_bytes, height) > kLargestBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::size_t rounded = (width_bytes + kPitch - 1) / kPitch * kPitch;
  if (rounded != 0 && height > kLargestBytes / rounded) return CUDA_ERROR_OUT_OF_MEMORY;
  *pitch = rounded;
  return cuMemAlloc_v2(pointer, rounded * height);
}

// ---- pools: each device's default one, which keeps nothing that is free

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  return give(pool, [&] { return reinterpret_cast<CUmemoryPool>(&gpu(device)); });
}

CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) { return cuDeviceGetDefaultMemPool(pool, device); }

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const auto known = [&](const auto& gpu) { return reinterpret_cast<CUmemoryPool>(gpu.get()) == pool; };
    const auto found = std::find_if(driver().gpus.begin(), driver().gpus.end(), known);
    require(found != driver().gpus.end());
    require(attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT || attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            CUDA_ERROR_NOT_SUPPORTED);
    const auto device = static_cast<int>(found - driver().gpus.begin());
    cuuint64_t bytes = 0;
    for (const auto& [address, allocation] : driver().allocations) {
      if (allocation.of_pool && allocation.context->device == device) bytes += allocation.bytes;
    }
    std::memcpy(value, &bytes, sizeof bytes);
  });
}

CUresult cuMemPoolTrimTo(CUmemoryPool, size_t) {
  return with_driver([](Lock&) {});
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* pointer, size_t bytes, CUmemoryPool, CUstream stream) {
  return cuMemAllocAsync(pointer, bytes, stream);
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
  return cuMemAllocFromPoolAsync(pointer, bytes, pool, per_thread(stream));
}

// ---- copies

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy(nullptr, to, Side::kEither, from, Side::kEither, bytes, true);
}

CUresult cuMemcpy_ptds(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy(CU_STREAM_PER_THREAD, to, Side::kEither, from, Side::kEither, bytes, true);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(stream, to, Side::kEither, from, Side::kEither, bytes, false);
}

CUresult cuMemcpyAsync_ptsz(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return cuMemcpyAsync(to, from, bytes, per_thread(stream));
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return copy(nullptr, to, Side::kDevice, address_of(from), Side::kHost, bytes, true);
}

CUresult cuMemcpyHtoD_v2_ptds(CUdeviceptr to, const void* from, size_t bytes) {
  return copy(CU_STREAM_PER_THREAD, to, Side::kDevice, address_of(from), Side::kHost, bytes, true);
}

CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return copy(nullptr, address_of(to), Side::kHost, from, Side::kDevice, bytes, true);
}

CUresult cuMemcpyDtoH_v2_ptds(void* to, CUdeviceptr from, size_t bytes) {
  return copy(CU_STREAM_PER_THREAD, address_of(to), Side::kHost, from, Side::kDevice, bytes, true);
}

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D* params) { return copy_rows(nullptr, params); }
CUresult cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D* params) { return copy_rows(CU_STREAM_PER_THREAD, params); }
CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* params) { return copy_rows(nullptr, params); }
CUresult cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D* params) { return copy_rows(CU_STREAM_PER_THREAD, params); }
CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D* params) { return copy_rows(nullptr, params); }
CUresult cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D* params) { return copy_rows(CU_STREAM_PER_THREAD, params); }

// Between device addresses a synchronous copy is asynchronous to the host, as in CUDA.
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy(nullptr, to, Side::kDevice, from, Side::kDevice, bytes, false);
}

CUresult cuMemcpyDtoD_v2_ptds(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy(CU_STREAM_PER_THREAD, to, Side::kDevice, from, Side::kDevice, bytes, false);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return copy(stream, to, Side::kDevice, address_of(from), Side::kHost, bytes, false);
}

CUresult cuMemcpyHtoDAsync_v2_ptsz(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return cuMemcpyHtoDAsync_v2(to, from, bytes, per_thread(stream));
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(stream, address_of(to), Side::kHost, from, Side::kDevice, bytes, false);
}

CUresult cuMemcpyDtoHAsync_v2_ptsz(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return cuMemcpyDtoHAsync_v2(to, from, bytes, per_thread(stream));
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(stream, to, Side::kDevice, from, Side::kDevice, bytes, false);
}

CUresult cuMemcpyDtoDAsync_v2_ptsz(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return cuMemcpyDtoDAsync_v2(to, from, bytes, per_thread(stream));
}

// ---- memset

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) { return set(nullptr, to, value, 1, count); }

CUresult cuMemsetD8_v2_ptds(CUdeviceptr to, unsigned char value, size_t count) {
  return set(CU_STREAM_PER_THREAD, to, value, 1, count);
}

CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) { return set(nullptr, to, value, 4, count); }

CUresult cuMemsetD32_v2_ptds(CUdeviceptr to, unsigned value, size_t count) {
  return set(CU_STREAM_PER_THREAD, to, value, 4, count);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return set(stream, to, value, 1, count);
}

CUresult cuMemsetD8Async_ptsz(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return set(per_thread(stream), to, value, 1, count);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  return set(stream, to, value, 4, count);
}

CUresult cuMemsetD32Async_ptsz(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  return set(per_thread(stream), to, value, 4, count);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* begin, size_t* bytes, CUdeviceptr pointer) {
  return with_driver([&](Lock&) {
    std::uintptr_t base = 0;
    const Allocation* const allocation = find_allocation(pointer, 1, &base);
    require(allocation != nullptr, CUDA_ERROR_NOT_FOUND);
    if (begin != nullptr) *begin = base;
    if (bytes != nullptr) *bytes = allocation->bytes;
  });
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    std::uintptr_t base = 0;
    const Allocation* const allocation = find_allocation(pointer, 1, &base);
    require(allocation != nullptr);
    const auto put = [&](auto value) { std::memcpy(data, &value, sizeof value); };
    switch (attribute) {
      case CU_POINTER_ATTRIBUTE_CONTEXT:
        return put(reinterpret_cast<CUcontext>(allocation->context.get()));
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return put(static_cast<unsigned>(allocation->type));
      case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        return put(pointer);
      case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        require(allocation->type == CU_MEMORYTYPE_HOST);
        return put(pointer);
      case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        return put(0U);
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return put(allocation->context->device);
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        return put(static_cast<CUdeviceptr>(base));
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        return put(allocation->bytes);
      default:
        throw Refused(CUDA_ERROR_NOT_SUPPORTED);
    }
  });
}

// What a pointer does not have is left as it is.
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; ++i) cuPointerGetAttribute(data[i], attributes[i], pointer);
  return may_call();
}

}  // extern "C"
#pragma GCC visibility pop
