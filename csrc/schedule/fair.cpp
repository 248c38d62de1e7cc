#include "schedule/fair.hpp"

#include <algorithm>
#include <limits>

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kNoClientNs = std::numeric_limits<std::int64_t>::max();

std::int64_t least_of(std::uint64_t slots, const std::int64_t* virtual_ns) noexcept {
  std::int64_t least_ns = kNoClientNs;
  for (; slots != 0; slots &= slots - 1) least_ns = std::min(least_ns, virtual_ns[__builtin_ctzll(slots)]);
  return least_ns;
}

}  // namespace

std::int64_t charge_ns(std::int64_t gpu_ns, std::int32_t priority, std::uint32_t weight_milli) noexcept {
  constexpr std::int64_t kMostNs =
      (std::numeric_limits<std::int64_t>::max() >> (kLargestPriority + 1)) / kEvenWeightMilli * kLeastWeightMilli;
  const int step = std::clamp(priority, -kLargestPriority, kLargestPriority);
  const std::int64_t bounded_ns = std::clamp<std::int64_t>(gpu_ns, 1, kMostNs);
  const std::int64_t even_ns = std::max<std::int64_t>(step >= 0 ? bounded_ns >> step : bounded_ns << -step, 1);
  if (weight_milli == kEvenWeightMilli) return even_ns;
  const std::int64_t weight = std::clamp(weight_milli, kLeastWeightMilli, kMostWeightMilli);
  const std::int64_t whole = even_ns / weight;
  return std::max<std::int64_t>(whole * kEvenWeightMilli + even_ns % weight * kEvenWeightMilli / weight, 1);
}

std::int64_t joined_ns(const JoinView& view) noexcept {
  std::int64_t joined_ns = view.virtual_ns[view.self];
  if (view.at_work != 0) return std::max(joined_ns, least_of(view.at_work, view.virtual_ns));
  for (std::uint64_t others = view.others; others != 0; others &= others - 1) {
    joined_ns = std::max(joined_ns, view.virtual_ns[__builtin_ctzll(others)]);
  }
  return joined_ns;
}

bool may_feed(const FairView& view) noexcept {
  if (view.waited_ns >= view.max_wait_ns) return true;
  const std::int64_t least_ns = least_of(view.waiting & ~(std::uint64_t{1} << view.self), view.virtual_ns);
  return least_ns == kNoClientNs || view.virtual_ns[view.self] - view.quantum_ns <= least_ns;
}

}  // namespace cudasched::schedule
