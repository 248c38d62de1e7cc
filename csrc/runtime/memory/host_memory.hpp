// The host's memory that programs could still have, where a GPU has none of its own. Any thread; no allocation, no
// lock.
#pragma once

#include <cstdint>

namespace cudasched::runtime {

inline constexpr std::uint64_t kUnknownMemory = UINT64_MAX;

// MemAvailable of /proc/meminfo, in bytes: free memory, and memory that the kernel can take back without swapping.
// kUnknownMemory: the file does not say.
std::uint64_t available_host_bytes(const char* path = "/proc/meminfo") noexcept;

}  // namespace cudasched::runtime
