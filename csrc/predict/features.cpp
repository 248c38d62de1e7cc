#include "predict/features.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "predict/words.hpp"

namespace cudasched::predict {
namespace {

constexpr std::uint32_t kLeastSize = 2;
constexpr std::uint32_t kSizeLimit = 1U << 28;
constexpr std::size_t kSizes = 6;

// Base 2; exact at powers of two, 0 for 0. A float's bits are its logarithm: exponent, then mantissa.
float log2_of(std::uint64_t value) noexcept {
  const auto real = static_cast<float>(static_cast<std::int64_t>(std::max<std::uint64_t>(value, 1)));
  return static_cast<float>(std::bit_cast<std::int32_t>(real) - 0x3f80'0000) * 0x1p-23F;
}

// Of the words that are sizes: the greatest distinct ones in falling order, and how many there are in all.
struct Sizes {
  std::array<std::uint32_t, kSizes> greatest{};
  std::uint32_t count = 0;

  void add(std::uint32_t word) noexcept {
    const bool is_size = word - kLeastSize < kSizeLimit - kLeastSize;
    count += is_size ? 1 : 0;
    if (!is_size || word <= greatest.back()) return;
    std::size_t place = kSizes - 1;
    for (std::size_t i = 0; i < kSizes; ++i) {
      if (greatest[i] == word) return;
      if (greatest[i] < word) {
        place = i;
        break;
      }
    }
    std::copy_backward(greatest.begin() + static_cast<std::ptrdiff_t>(place), greatest.end() - 1, greatest.end());
    greatest[place] = word;
  }
};

Sizes sizes_of(std::span<const std::uint32_t> words, const Allocations* allocations) noexcept {
  Sizes sizes;
  std::size_t at = 0;
  for (; at + 1 < words.size(); at += 2) {
    const std::uint32_t low = words[at];
    const std::uint32_t high = words[at + 1];
    if ((low | high) == 0 || is_pointer(low, high, allocations)) continue;
    sizes.add(low);
    sizes.add(high);
  }
  if (at < words.size()) sizes.add(words[at]);
  return sizes;
}

}  // namespace

void features(const Query& query, const Allocations* allocations, float* row) noexcept {
  static constexpr Function kUnknown{};
  const Launch& launch = query.launch;
  const Function& function = query.function != nullptr ? *query.function : kUnknown;
  const NameTraits& traits = function.traits;
  const Residency& residency = query.residency;

  const std::uint64_t blocks = std::max<std::uint64_t>(launch.blocks(), 1);
  const std::uint32_t threads = std::max(launch.threads_per_block(), 1U);
  const auto sm_count = static_cast<std::uint64_t>(std::max(residency.sm_count, 1));
  const auto blocks_per_sm = static_cast<std::uint64_t>(std::max(residency.blocks_per_sm, 1));
  const std::uint64_t resident = sm_count * blocks_per_sm;
  const std::uint64_t whole_waves = (blocks + resident - 1) / resident;
  const std::uint64_t in_tail = blocks - (whole_waves - 1) * resident;
  const float log_blocks = log2_of(blocks);
  const float log_threads = log2_of(threads);
  const float log_waves = log2_of(whole_waves);

  const Sizes sizes = sizes_of(query.words, allocations);
  std::array<float, kSizes> logs{};
  for (std::size_t i = 0; i < kSizes; ++i) logs[i] = log2_of(sizes.greatest[i]);

  float* out = row;
  const auto put = [&out](float value) { *out++ = value; };
  put(log_blocks);
  for (const std::uint32_t side : launch.grid) put(log2_of(side));
  put(log_threads);
  put(log2_of(launch.block[0]));
  put(log2_of(launch.block[1]));
  put(log2_of(std::uint64_t{launch.cluster[0]} * launch.cluster[1] * launch.cluster[2]));
  put(log_blocks + log_threads);
  put(log2_of(launch.dynamic_shared_bytes));
  put(log2_of(function.static_shared_bytes));
  put(static_cast<float>(function.registers));
  put(log2_of(function.local_bytes));
  put(log2_of(function.max_threads));
  put(static_cast<float>(blocks_per_sm));
  put(static_cast<float>(blocks_per_sm * threads) / static_cast<float>(std::max(residency.max_threads_per_sm, 1)));
  put(log_blocks - log2_of(resident));
  put(log_waves);
  put(static_cast<float>(in_tail) / static_cast<float>(resident));
  put(static_cast<float>(sm_count));
  const float log_m = log2_of(traits.tile[0]);
  const float log_n = log2_of(traits.tile[1]);
  put(log_m);
  put(log_n);
  put(log2_of(traits.tile[2]));
  put(static_cast<float>(traits.stages));
  put(static_cast<float>(traits.element_bytes));
  put(static_cast<float>(traits.vector_width));
  put(static_cast<float>(traits.family));
  put(log2_of(function.parameter_bytes));
  for (const float log : logs) put(log);
  put(log2_of(std::uint64_t{sizes.count} + 1));
  put(logs[0] + logs[1]);
  put(logs[0] + logs[1] + logs[2]);
  put(logs[0] + logs[1] + logs[2] + logs[3]);
  put(log_blocks + log_m + log_n + logs[0] - log2_of(sm_count));
  put(log_waves + logs[0]);
  put(log_blocks + log_threads + log2_of(traits.vector_width) + log2_of(traits.element_bytes));
  put(logs[0] - log_blocks - log_threads);
}

}  // namespace cudasched::predict
