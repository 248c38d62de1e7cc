#include "predict/outlook.hpp"

#include <algorithm>
#include <cmath>

#include "predict/work.hpp"

namespace cudasched::predict {
namespace {

constexpr std::uint32_t kWarpThreads = 32;

}  // namespace

Outlook outlook_of(const Query& query, std::int64_t duration_ns) noexcept {
  constexpr float kNsPerSecond = 1e9F;
  const Launch& launch = query.launch;
  if (launch.is_graph) return {};
  const std::uint64_t threads = std::max(launch.threads_per_block(), 1U);
  const std::uint64_t warps = (threads + kWarpThreads - 1) / kWarpThreads;
  const auto sm_count = static_cast<float>(std::max(query.residency.sm_count, 1));
  const auto blocks = static_cast<float>(std::max<std::uint64_t>(launch.blocks(), 1));
  Outlook outlook;
  outlook.block_efficiency = static_cast<float>(threads) / static_cast<float>(warps * kWarpThreads);
  if (query.residency.blocks_per_sm > 0) {
    const auto held = static_cast<float>(query.residency.blocks_per_sm);
    const auto most = static_cast<float>(std::max(query.residency.max_threads_per_sm, 1));
    outlook.occupancy = std::min(1.0F, held * static_cast<float>(warps * kWarpThreads) / most);
    outlook.waves = blocks / (held * sm_count);
    outlook.sm_utilisation =
        outlook.waves <= 1 ? std::min(1.0F, blocks / sm_count) : outlook.waves / std::ceil(outlook.waves);
  }
  if (query.function == nullptr || duration_ns <= 0) return outlook;
  const NameTraits& traits = query.function->traits;
  const Work work = work_of(traits.layout, query.words, launch.blocks(), traits.element_bytes);
  const float per_second = kNsPerSecond / static_cast<float>(duration_ns);
  outlook.bytes_per_s = static_cast<float>(work.bytes) * per_second;
  outlook.flops_per_s = static_cast<float>(work.flops) * per_second;
  return outlook;
}

Level level_of(const Query& query, std::int64_t duration_ns) noexcept {
  constexpr double kWarningGain = 0.05;
  constexpr double kCriticalGain = 0.25;
  constexpr double kHalf = 0.5;  // of the part that few blocks or a tail leave empty
  constexpr double kMostWavesWithTail = 8;
  constexpr double kEmptyKernelNs = 1'500;
  constexpr std::uint32_t kSpillBytes = 32;
  constexpr std::uint32_t kManySpillBytes = 256;
  constexpr std::uint32_t kMostRegisters = 255;
  static constexpr Function kUnknown{};
  const Function& function = query.function != nullptr ? *query.function : kUnknown;
  if (query.launch.is_graph || function.traits.is_library) return Level::kNotJudged;
  const double threads = std::max(query.launch.threads_per_block(), 1U);
  double gain = 1 - threads / (kWarpThreads * std::ceil(threads / kWarpThreads));
  const auto blocks = static_cast<double>(query.launch.blocks());
  const double sm_count = std::max(query.residency.sm_count, 1);
  if (blocks < sm_count) gain = std::max(gain, kHalf * (1 - blocks / sm_count));
  const double waves = blocks / (sm_count * std::max(query.residency.blocks_per_sm, 1));
  if (waves > 1 && waves <= kMostWavesWithTail && waves - std::ceil(waves) + 1 < kHalf) {
    gain = std::max(gain, kHalf * (1 - waves / std::ceil(waves)));
  }
  if (function.local_bytes >= kSpillBytes) {
    const bool many = function.local_bytes >= kManySpillBytes || function.registers >= kMostRegisters;
    gain = std::max(gain, many ? 0.2 : 0.1);
  }
  if (duration_ns > 0) gain *= std::max(0.0, 1 - kEmptyKernelNs / static_cast<double>(duration_ns));
  if (gain < kWarningGain) return Level::kGood;
  return std::round(1'000 * gain) >= 1'000 * kCriticalGain ? Level::kCritical : Level::kWarning;  // as printed
}

// Nothing is ever taken out.
bool Outlooks::is_new(std::uint64_t shape) noexcept {
  if (count_ == kMostShapes) return false;
  if (shape == 0) shape = 1;
  std::size_t at = shape % kPlaces;
  while (shapes_[at] != 0) {
    if (shapes_[at] == shape) return false;
    at = (at + 1) % kPlaces;
  }
  ++count_;
  shapes_[at] = shape;
  return true;
}

void Outlooks::add(std::uint64_t shape, const Query& query, std::int64_t duration_ns) noexcept {
  if (query.residency.blocks_per_sm < 1 || !is_new(shape)) return;
  const auto grow = [](std::atomic<std::uint64_t>& sum, std::uint64_t by) {
    sum.store(sum.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);  // one writer at a time
  };
  const auto millionths = [](float share) { return static_cast<std::uint64_t>(static_cast<double>(share) * kUnit); };
  const Outlook outlook = outlook_of(query, 0);
  grow(shares_[0], millionths(outlook.occupancy));
  grow(shares_[1], millionths(outlook.sm_utilisation));
  grow(shares_[2], millionths(outlook.block_efficiency));
  std::atomic<std::uint64_t>& kernels = kernels_[static_cast<std::size_t>(level_of(query, duration_ns))];
  // The number last: a reader that sees a kernel has its shares.
  kernels.store(kernels.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

Outlooks::Sums Outlooks::sums() const noexcept {
  Sums sums;
  for (std::size_t i = 0; i < kLevels; ++i) sums.kernels[i] = kernels_[i].load(std::memory_order_acquire);
  sums.occupancy = shares_[0].load(std::memory_order_relaxed);
  sums.sm_utilisation = shares_[1].load(std::memory_order_relaxed);
  sums.block_efficiency = shares_[2].load(std::memory_order_relaxed);
  return sums;
}

}  // namespace cudasched::predict
