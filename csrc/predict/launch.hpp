// What the predictor knows of a launch before it runs.
#pragma once

#include <cstdint>

#include "base/hash.hpp"

namespace cudasched::predict {

struct Launch {
  const void* function = nullptr;  // the kernel, or the executable graph
  std::uint32_t grid[3] = {1, 1, 1};
  std::uint32_t block[3] = {1, 1, 1};
  std::uint32_t dynamic_shared_bytes = 0;
  bool is_graph = false;

  std::uint64_t blocks() const noexcept { return std::uint64_t{grid[0]} * grid[1] * grid[2]; }
  std::uint32_t threads_per_block() const noexcept { return block[0] * block[1] * block[2]; }

  // Launches with the same key are taken to last equally long. Never 0.
  std::uint64_t key() const noexcept {
    std::uint64_t hash = mix(0, reinterpret_cast<std::uintptr_t>(function));
    hash = mix(hash, std::uint64_t{grid[0]} << 32 | grid[1]);
    hash = mix(hash, std::uint64_t{grid[2]} << 32 | block[0]);
    hash = mix(hash, std::uint64_t{block[1]} << 32 | block[2]);
    hash = mix(hash, dynamic_shared_bytes);
    return hash | 1;
  }
};

// How a kernel fills the device: what the guess before the first sample is made of.
struct Residency {
  int blocks_per_sm = 1;
  int sm_count = 1;
};

}  // namespace cudasched::predict
