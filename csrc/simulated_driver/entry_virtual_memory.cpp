// Entry points: virtual memory. Physical memory is a part of one file of the process without a name, and counts until
// it is released and mapped nowhere. What is mapped outside of reserved ranges counts alone.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <utility>

#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

// Of all physical memory; made at its first use.
int memory_file() {
  static const int file = memfd_create("cudasched-sim-memory", MFD_CLOEXEC);
  return file;
}

void end_physical(std::map<CUmemGenericAllocationHandle, PhysicalMemory>::iterator which) {
  const PhysicalMemory& memory = which->second;
  if (memory.counts) give_device_memory_back(*memory.context, memory.bytes);
  if (memory.place >= 0) {
    fallocate(memory_file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory.place,
              static_cast<off_t>(memory.bytes));
  }
  driver().physical.erase(which);
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// Nothing can be read or written there, and no other mapping of the process goes there.
bool close_off(CUdeviceptr address, std::size_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(pointer(address), bytes, PROT_NONE, kFlags, -1, 0) != MAP_FAILED;
}

void map_memory(CUdeviceptr address, PhysicalMemory& memory) {
  static off_t end = 0;
  if (memory.place < 0) {
    const off_t place = end;
    const bool longer = ftruncate(memory_file(), place + static_cast<off_t>(memory.bytes)) == 0;
    require(longer, CUDA_ERROR_OUT_OF_MEMORY);
    memory.place = place;
    end += static_cast<off_t>(memory.bytes);
  }
  void* const made =
      mmap(pointer(address), memory.bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory_file(), memory.place);
  require(made != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
}

// The mappings that make up the bytes; empty where these begin or end inside one, or have a gap.
std::map<CUdeviceptr, PhysicalMemory*> whole_mappings(CUdeviceptr address, std::size_t bytes) {
  std::map<CUdeviceptr, PhysicalMemory*> found;
  CUdeviceptr end = address;
  for (auto at = driver().mappings.find(address);
       at != driver().mappings.end() && at->first == end && end < address + bytes; ++at) {
    PhysicalMemory& memory = driver().physical.find(at->second)->second;
    found.emplace(at->first, &memory);
    end += memory.bytes;
  }
  if (end != address + bytes) found.clear();
  return found;
}

bool overlaps_mapping(CUdeviceptr address, std::size_t bytes) {
  auto next = driver().mappings.lower_bound(address + bytes);
  if (next == driver().mappings.begin()) return false;
  --next;
  return next->first + driver().physical.find(next->second)->second.bytes > address;
}

}  // namespace

bool is_reserved(std::uintptr_t address, std::size_t bytes) {
  auto next = driver().ranges.upper_bound(address);
  if (next == driver().ranges.begin()) return false;
  --next;
  return address - next->first < next->second && bytes <= next->second - (address - next->first);
}

}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags) {
  if (granularity == nullptr || properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *granularity = kGranularity;
  return may_call();
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr,
                             unsigned long long flags) {
  if (address == nullptr || bytes == 0 || bytes % kGranularity != 0 || flags != 0 || alignment > kGranularity) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return with_driver([&](Lock&) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const made = mmap(nullptr, bytes + kGranularity, PROT_NONE, kFlags, -1, 0);
    require(made != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    const auto at = reinterpret_cast<CUdeviceptr>(made);
    *address = (at + kGranularity - 1) / kGranularity * kGranularity;
    if (*address != at) munmap(made, *address - at);
    munmap(pointer(*address + bytes), at + kGranularity - *address);
    driver().ranges.emplace(*address, bytes);
  });
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  return with_driver([&](Lock&) {
    const auto found = driver().ranges.find(address);
    require(found != driver().ranges.end() && found->second == bytes && !overlaps_mapping(address, bytes));
    driver().ranges.erase(found);
    munmap(pointer(address), bytes);
  });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long) {
  if (properties == nullptr || bytes == 0 || bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  return give(handle, [&] {
    const std::shared_ptr<Context> context = current_context();
    const CUmemLocation& place = properties->location;
    require(place.type == CU_MEM_LOCATION_TYPE_DEVICE && place.id == context->device, CUDA_ERROR_NOT_SUPPORTED);
    take_device_memory(*context, bytes);
    driver().physical.emplace(driver().next_id, PhysicalMemory{.bytes = bytes, .context = context});
    return driver().next_id++;
  });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return with_driver([&](Lock&) {
    const auto found = driver().physical.find(handle);
    require(found != driver().physical.end() && std::exchange(found->second.held, false));
    if (found->second.mappings == 0) end_physical(found);
  });
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  return with_driver([&](Lock&) {
    PhysicalMemory& memory = find(driver().physical, handle, CUDA_ERROR_INVALID_VALUE);
    require(memory.held && offset == 0 && bytes == memory.bytes && !overlaps_mapping(address, bytes));
    if (is_reserved(address, bytes)) map_memory(address, memory);
    driver().mappings.emplace(address, handle);
    ++memory.mappings;
  });
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  if (access == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    const auto mappings = whole_mappings(address, bytes);
    require(!mappings.empty() && is_reserved(address, bytes));
    for (const auto& [at, memory] : mappings) {
      const bool opened = mprotect(pointer(at), memory->bytes, PROT_READ | PROT_WRITE) == 0;
      require(opened, CUDA_ERROR_OUT_OF_MEMORY);
      Allocation made{.bytes = memory->bytes, .context = memory->context};
      made.mapped = true;
      driver().allocations.insert_or_assign(at, made);
    }
  });
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  return with_driver([&](Lock&) {
    const auto mappings = whole_mappings(address, bytes);
    require(!mappings.empty());
    for (const auto& [at, memory] : mappings) {
      if (is_reserved(at, memory->bytes)) {
        close_off(at, memory->bytes);
        driver().allocations.erase(at);
      }
      const auto mapping = driver().mappings.find(at);
      const auto found = driver().physical.find(mapping->second);
      driver().mappings.erase(mapping);
      if (--found->second.mappings == 0 && !found->second.held) end_physical(found);
    }
  });
}

}  // extern "C"
#pragma GCC visibility pop
