#include "schedule/slice_length.hpp"

#include <algorithm>

namespace cudasched::schedule {

bool SliceLength::starves(const Look& seen) noexcept {
  if (!seen.in_flight || seen.completions != completions_ || looked_ns_ == 0) {
    without_ns_ = 0;
  } else if (!seen.latency_active) {
    without_ns_ += std::max<std::int64_t>(0, seen.now_ns - looked_ns_);
  }
  completions_ = seen.completions;
  looked_ns_ = seen.now_ns;
  if (seen.now_ns < relief_until_ns_) return true;
  // Since the relief has ended, it went well for longer than the relief was.
  if (relief_until_ns_ != 0 && seen.now_ns - relief_until_ns_ > relief_ns_) relief_ns_ = kReliefNs;
  if (without_ns_ <= kStarvedNs) return false;
  if (relief_until_ns_ != 0) relief_ns_ = std::min(2 * relief_ns_, kMostReliefNs);
  relief_until_ns_ = seen.now_ns + relief_ns_;
  without_ns_ = 0;
  return true;
}

std::uint32_t SliceLength::look(const Look& seen) noexcept {
  const bool starving = starves(seen);
  const std::uint32_t shortest_us = set_us_.value_or(kShortestUs);
  const std::uint32_t relieved_us = std::max(shortest_us, kStarvingUs);
  const std::uint32_t shared_us = set_us_ ? relieved_us : kSharedUs;
  const std::uint32_t us = seen.others > 0 ? shared_us : starving ? relieved_us : shortest_us;
  if (us == us_ || (changed_ns_ != 0 && seen.now_ns - changed_ns_ < kLeastChangeNs)) return us_;
  if (us_ != 0) changed_ns_ = seen.now_ns;
  us_ = us;
  return us_;
}

}  // namespace cudasched::schedule
