// Module images of the simulated driver: text that describes each kernel (format: double.hpp). Pure; throws nothing but
// std::bad_alloc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cudasched::simulated_driver {

enum class Effect { kNone, kAppend, kAxpy, kCondition, kCountdown };

struct KernelSpec {
  std::string name;
  std::vector<std::uint32_t> param_bytes;
  std::vector<std::uint32_t> param_offsets;  // in the parameter buffer, each aligned to its size
  std::uint32_t params_total_bytes = 0;
  std::uint32_t regs = 32;
  std::uint32_t shared_bytes = 0;
  std::uint32_t threads_max = 1024;
  std::uint32_t block_us = 20;
  std::int32_t block_us_param = -1;  // the parameter that holds the block time, -1: block_us holds it
  std::uint32_t blocks_per_sm = 4;
  Effect effect = Effect::kNone;
};

inline constexpr std::size_t kImageBytesMax = 1 << 20;
inline constexpr std::size_t kImageKernelsMax = 4096;
inline constexpr std::size_t kParamsBytesMax = 4096;

// None: not an image, or an error in any line of it.
std::optional<std::vector<KernelSpec>> parse_image(std::string_view text);

}  // namespace cudasched::simulated_driver
