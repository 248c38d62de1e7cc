// A launch as the program passes it to the driver, and the other facts that the predictor may use before the run.
#pragma once

#include <cstdint>
#include <span>

#include "predict/function.hpp"

namespace cudasched::predict {

struct Launch {
  const void* function = nullptr;  // the kernel's handle, or the executable graph's
  std::uint32_t grid[3] = {1, 1, 1};
  std::uint32_t block[3] = {1, 1, 1};
  std::uint32_t dynamic_shared_bytes = 0;
  bool is_graph = false;
  std::uint32_t cluster[3] = {1, 1, 1};
  void* const* parameters = nullptr;  // as cuLaunchKernel takes them; null with `extra`, and for graphs
  void* const* extra = nullptr;

  std::uint64_t blocks() const noexcept { return std::uint64_t{grid[0]} * grid[1] * grid[2]; }
  std::uint32_t threads_per_block() const noexcept { return block[0] * block[1] * block[2]; }
};

// How a kernel fills the device.
struct Residency {
  int blocks_per_sm = 1;
  int sm_count = 1;
  int max_threads_per_sm = 2048;
};

// The input of predict(). `words` is the parameter block, copied, in units of 4 bytes; empty where it is not known.
struct Query {
  const Launch& launch;
  const Function* function = nullptr;  // null: a graph, or a driver that describes no functions
  std::span<const std::uint32_t> words;
  Residency residency;
  bool busy = false;             // other work runs on the device beside the launch
  bool lacks_residency = false;  // the driver was not asked for it
};

}  // namespace cudasched::predict
