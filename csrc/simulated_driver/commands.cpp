#include "simulated_driver/commands.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/clock.hpp"
#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {
namespace {

thread_local bool t_in_host_function = false;

constexpr std::uint32_t kThreadsPerSm = 2048;
constexpr std::uint32_t kRegistersPerSm = 65536;
constexpr std::uint32_t kRegisterUnit = 256;  // registers are given to warps in units of
constexpr std::uint64_t kSharedBytesPerSm = 228 * 1024;
constexpr std::uint64_t kSharedBytesReserved = 1024;

template <class T>
T param(const KernelCommand& kernel, std::size_t index) {
  T value{};
  std::memcpy(&value, kernel.params.data() + kernel.spec->param_offsets[index], sizeof value);
  return value;
}

bool allocated(std::uintptr_t address, std::size_t bytes) {
  const Lock lock(driver().mutex);
  return find_allocation(address, bytes) != nullptr;
}

// As a device's store to memory that the host watches: whole, where aligned.
void store(std::uint64_t address, std::uint64_t value) {
  auto* const word = reinterpret_cast<std::uint64_t*>(address);
  if (address % sizeof value == 0) {
    std::atomic_ref(*word).store(value);
  } else {
    std::memcpy(word, &value, sizeof value);
  }
}

CUresult apply_append(const KernelCommand& kernel) {
  const auto log = param<std::uint64_t>(kernel, 0);
  const auto cursor = param<std::uint64_t>(kernel, 1);
  if (!allocated(cursor, sizeof(std::uint64_t))) return CUDA_ERROR_ILLEGAL_ADDRESS;
  std::uint64_t position = 0;
  std::memcpy(&position, reinterpret_cast<const void*>(cursor), sizeof position);
  const std::uint64_t entry = log + position * sizeof(std::uint64_t);
  if (!allocated(entry, sizeof(std::uint64_t))) return CUDA_ERROR_ILLEGAL_ADDRESS;
  store(entry, param<std::uint64_t>(kernel, 2));
  store(cursor, position + 1);
  return CUDA_SUCCESS;
}

CUresult apply_axpy(const KernelCommand& kernel) {
  const auto y = param<std::uint64_t>(kernel, 0);
  const auto x = param<std::uint64_t>(kernel, 1);
  const auto a = param<float>(kernel, 2);
  const auto count = param<std::uint32_t>(kernel, 3);
  const std::size_t bytes = count * sizeof(float);
  if (count != 0 && (!allocated(y, bytes) || !allocated(x, bytes))) return CUDA_ERROR_ILLEGAL_ADDRESS;
  auto* const to = reinterpret_cast<float*>(y);
  const auto* const from = reinterpret_cast<const float*>(x);
  for (std::uint32_t i = 0; i < count; ++i) to[i] += a * from[i];
  return CUDA_SUCCESS;
}

// As cudaGraphSetConditional.
void set_condition(CUgraphConditionalHandle handle, unsigned value) {
  const Lock lock(driver().mutex);
  const auto found = driver().conditions.find(handle);
  if (found != driver().conditions.end()) found->second.value = value;
}

CUresult apply_countdown(const KernelCommand& kernel) {
  const auto counter = param<std::uint64_t>(kernel, 1);
  if (!allocated(counter, sizeof(std::uint64_t))) return CUDA_ERROR_ILLEGAL_ADDRESS;
  std::uint64_t left = 0;
  std::memcpy(&left, reinterpret_cast<const void*>(counter), sizeof left);
  if (left > 0) store(counter, --left);
  set_condition(param<std::uint64_t>(kernel, 0), left > 0 ? 1 : 0);
  return CUDA_SUCCESS;
}

CUresult apply_set(const SetCommand& set) {
  for (std::size_t row = 0; row < set.height; ++row) {
    const std::uintptr_t first = set.destination + row * set.pitch;
    if (!allocated(first, set.count * set.width_bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    auto* const to = reinterpret_cast<std::uint8_t*>(first);
    if (set.width_bytes == 1) {
      std::memset(to, static_cast<int>(set.value), set.count);
      continue;
    }
    for (std::size_t i = 0; i < set.count; ++i) std::memcpy(to + i * set.width_bytes, &set.value, set.width_bytes);
  }
  return CUDA_SUCCESS;
}

// Host memory that is none of ours counts as there.
bool mapped(std::uintptr_t address, std::size_t bytes) {
  const Lock lock(driver().mutex);
  return !is_reserved(address, 1) || find_allocation(address, bytes) != nullptr;
}

CUresult apply_copy(const CopyCommand& copy) {
  for (std::size_t z = 0; z < copy.depth; ++z) {
    for (std::size_t y = 0; y < copy.height; ++y) {
      const std::uintptr_t from = copy.source.address + z * copy.source.slice + y * copy.source.pitch;
      const std::uintptr_t to = copy.destination.address + z * copy.destination.slice + y * copy.destination.pitch;
      if (!mapped(to, copy.bytes) || (!copy.staged && !mapped(from, copy.bytes))) return CUDA_ERROR_ILLEGAL_ADDRESS;
      const void* const source = copy.staged ? copy.staged->data() : reinterpret_cast<const void*>(from);
      std::memmove(reinterpret_cast<void*>(to), source, copy.bytes);
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace

Work work_of(const Command& command, int priority) {
  if (const auto* kernel = std::get_if<KernelCommand>(&command)) {
    const KernelSpec& spec = *kernel->spec;
    std::int64_t block_us = spec.block_us;
    if (spec.block_us_param >= 0) {
      block_us = param<std::uint32_t>(*kernel, static_cast<std::size_t>(spec.block_us_param));
    }
    return {.kind = OpKind::kKernel,
            .priority = priority,
            .blocks = kernel->blocks,
            .blocks_per_sm = kernel->blocks_per_sm,
            .block_ns = std::clamp<std::int64_t>(block_us * kNsPerUs, 1, kMaxDurationNs)};
  }
  if (const auto* copy = std::get_if<CopyCommand>(&command)) {
    return {.kind = OpKind::kCopy, .bytes = copy->bytes * copy->height * copy->depth};
  }
  if (const auto* set = std::get_if<SetCommand>(&command)) {
    return {.kind = OpKind::kCopy, .bytes = set->count * set->width_bytes * set->height};
  }
  return {.kind = OpKind::kMarker};
}

CUresult apply(const Command& command) {
  if (const auto* kernel = std::get_if<KernelCommand>(&command)) {
    switch (kernel->spec->effect) {
      case Effect::kAppend:
        return apply_append(*kernel);
      case Effect::kAxpy:
        return apply_axpy(*kernel);
      case Effect::kCondition:
        set_condition(param<std::uint64_t>(*kernel, 0), param<std::uint32_t>(*kernel, 1));
        return CUDA_SUCCESS;
      case Effect::kCountdown:
        return apply_countdown(*kernel);
      case Effect::kNone:
        return CUDA_SUCCESS;
    }
  }
  if (const auto* copy = std::get_if<CopyCommand>(&command)) return apply_copy(*copy);
  if (const auto* set = std::get_if<SetCommand>(&command)) return apply_set(*set);
  if (const auto* host = std::get_if<HostCommand>(&command)) call_host(host->function, host->data);
  if (const auto* freed = std::get_if<FreeCommand>(&command)) {
    const Lock lock(driver().mutex);
    release_memory(freed->address);
  }
  return CUDA_SUCCESS;
}

void call_host(CUhostFn function, void* data) {
  t_in_host_function = true;
  function(data);
  t_in_host_function = false;
}

bool in_host_function() { return t_in_host_function; }

std::uint32_t occupancy(const KernelSpec& spec, std::uint32_t threads, std::uint64_t dynamic_shared_bytes) {
  if (threads == 0 || threads > spec.threads_max) return 0;
  const std::uint32_t warps = (threads + 31) / 32;
  const std::uint32_t registers_per_warp = (spec.regs * 32 + kRegisterUnit - 1) / kRegisterUnit * kRegisterUnit;
  const std::uint64_t shared = spec.shared_bytes + dynamic_shared_bytes + kSharedBytesReserved;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>({spec.blocks_per_sm, kThreadsPerSm / (warps * 32),
                                                             kRegistersPerSm / (registers_per_warp * warps),
                                                             kSharedBytesPerSm / shared, kMaxBlocksPerSm}));
}

}  // namespace cudasched::simulated_driver
