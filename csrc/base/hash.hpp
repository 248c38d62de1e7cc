// Mixing of words into one 64-bit hash; for tables in memory, never for files or security.
#pragma once

#include <cstdint>

namespace cudasched {

constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t word) noexcept {
  hash = (hash ^ word) * 0x9e37'79b9'7f4a'7c15ULL;
  return hash ^ (hash >> 29);
}

}  // namespace cudasched
