#include "predict/outlook.hpp"

#include <algorithm>
#include <cmath>

#include "predict/work.hpp"

namespace cudasched::predict {

Outlook outlook_of(const Query& query, std::int64_t duration_ns) noexcept {
  constexpr std::uint32_t kWarp = 32;
  constexpr float kNsPerSecond = 1e9F;
  const Launch& launch = query.launch;
  if (launch.is_graph) return {};
  const std::uint32_t threads = std::max(launch.threads_per_block(), 1U);
  const std::uint32_t warps = (threads + kWarp - 1) / kWarp;
  const auto sm_count = static_cast<float>(std::max(query.residency.sm_count, 1));
  const auto blocks = static_cast<float>(std::max<std::uint64_t>(launch.blocks(), 1));
  Outlook outlook;
  outlook.block_efficiency = static_cast<float>(threads) / static_cast<float>(warps * kWarp);
  if (query.residency.blocks_per_sm > 0) {
    const auto held = static_cast<float>(query.residency.blocks_per_sm);
    const auto most = static_cast<float>(std::max(query.residency.max_threads_per_sm, 1));
    outlook.occupancy = std::min(1.0F, held * static_cast<float>(warps * kWarp) / most);
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

}  // namespace cudasched::predict
