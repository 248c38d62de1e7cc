// An operation's time on the device (work_of) and its effect on memory (apply). Graph nodes and directly submitted
// operations are the same commands.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "simulated_driver/image.hpp"
#include "simulated_driver/shared_device.hpp"

namespace cudasched::simulated_driver {

struct Event;
struct GraphMemory;

struct KernelCommand {
  std::shared_ptr<const KernelSpec> spec;
  std::uint64_t blocks = 1;
  std::uint32_t blocks_per_sm = 1;
  std::vector<std::uint8_t> params;  // one buffer, laid out by param_offsets
  CUfunction function = nullptr;     // as it was launched
  CUlaunchConfig config{};           // alike; without stream and attributes
  const void* context = nullptr;     // that the function belongs to
  bool cooperative = false;
};

// One end of a copy: the address, and the distances of rows and slices.
struct CopySide {
  std::uintptr_t address = 0;
  std::size_t pitch = 0;  // bytes from row to row
  std::size_t slice = 0;  // bytes from slice to slice
  CUmemorytype type = CU_MEMORYTYPE_HOST;
  const void* context = nullptr;  // that device memory was allocated in
};

struct CopyCommand {
  CopySide destination;
  CopySide source;
  std::size_t bytes = 0;  // of a row
  std::size_t height = 1;
  std::size_t depth = 1;
  std::shared_ptr<const std::vector<std::uint8_t>> staged;  // the source at the call, for pageable memory; one row
};

struct SetCommand {
  std::uintptr_t destination = 0;
  std::uint32_t value = 0;
  std::uint32_t width_bytes = 1;  // 1, 2 or 4
  std::size_t count = 0;          // of a row
  std::size_t height = 1;
  std::size_t pitch = 0;
  std::size_t bytes_max = 0;      // of a row, that an instantiated node has room for; 0: not instantiated
  const void* context = nullptr;  // that the memory was allocated in
};

struct HostCommand {
  CUhostFn function = nullptr;
  void* data = nullptr;
};

struct FreeCommand {
  std::uintptr_t address = 0;
};

// Of graph nodes: which event is recorded or waited for, which memory is there from now on or no longer.
struct EventCommand {
  std::shared_ptr<Event> event;
};

struct GraphMemoryCommand {
  std::shared_ptr<GraphMemory> memory;
};

using Command = std::variant<std::monostate, KernelCommand, CopyCommand, SetCommand, HostCommand, FreeCommand,
                             EventCommand, GraphMemoryCommand>;

Work work_of(const Command& command, int priority);

// Called once, with no lock held. CUDA_ERROR_ILLEGAL_ADDRESS: memory that is not allocated.
CUresult apply(const Command& command);

// Calls a function that may not call the driver.
void call_host(CUhostFn function, void* data);

// Is the calling thread inside a host function?
bool in_host_function();

// Blocks of `threads` threads with `dynamic_shared_bytes` that one SM holds; 0: not one.
std::uint32_t occupancy(const KernelSpec& spec, std::uint32_t threads, std::uint64_t dynamic_shared_bytes);

}  // namespace cudasched::simulated_driver
