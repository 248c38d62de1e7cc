// The host's memory that programs could still have, where a GPU has none of its own. Any thread; no allocation, no
// lock.
#pragma once

#include <cstdint>
#include <string>

namespace cudasched::runtime {

inline constexpr std::uint64_t kUnknownMemory = UINT64_MAX;

// MemAvailable of /proc/meminfo, in bytes: free memory, and memory that the kernel can take back without swapping.
// kUnknownMemory: the file does not say.
std::uint64_t available_host_bytes(const char* path = "/proc/meminfo") noexcept;

// The bytes that the memory control group of this process, and those above it, still allow (cgroup v2);
// kUnknownMemory: no limit. Allocates.
std::uint64_t control_group_room(const std::string& membership = "/proc/self/cgroup",
                                 const std::string& root = "/sys/fs/cgroup");

// The host's memory that this process could still have.
std::uint64_t room_on_host();

}  // namespace cudasched::runtime
