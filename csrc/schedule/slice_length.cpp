#include "schedule/slice_length.hpp"

#include <algorithm>

namespace cudasched::schedule {

// Counted once a second; a running mean in which the latest is a third.
double SliceLength::host_bound_share(const Look& seen) noexcept {
  const std::int64_t passed_ns = seen.now_ns - counted_ns_;
  if (counted_ns_ != 0 && passed_ns < kLeastChangeNs) return share_;
  const bool first = counted_ns_ == 0;
  counted_ns_ = seen.now_ns;
  share_ = 0;
  for (const Server& server : seen.servers) {
    Before& before = before_[server.slot % kSlots];
    // Less than before: another client has the slot.
    const bool known = !first && server.launches >= before.launches && server.requests > before.requests;
    double share = 0;
    if (known) {
      const auto requests = static_cast<double>(server.requests - before.requests);
      const auto launches = static_cast<double>(server.launches - before.launches);
      const auto took_ns = static_cast<double>(std::clamp<std::int64_t>(server.request_ns, 0, passed_ns));
      if (launches >= kHostBoundLaunches * requests) share = std::min(1.0, requests * took_ns / double(passed_ns));
    }
    before = {server.launches, server.requests, before.share + (share - before.share) / 3};
    share_ += before.share;
  }
  return share_;
}

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

SliceLength::Choice SliceLength::look(const Look& seen) noexcept {
  const double share = host_bound_share(seen);
  host_bound_ = share > (host_bound_ ? kNotHostBoundShare : kHostBoundShare);
  const bool starving = starves(seen);
  const bool hints =
      std::any_of(seen.servers.begin(), seen.servers.end(), [](const Server& each) { return each.hints; });
  const Choice choice{.us = host_bound_       ? kHostBoundUs
                            : seen.others > 0 ? kSharedUs
                            : starving        ? kStarvingUs
                                              : kShortestUs,
                      .gate = host_bound_ || hints};
  const bool changes = choice.us != choice_.us || choice.gate != choice_.gate;
  if (chosen_ && (!changes || seen.now_ns - changed_ns_ < kLeastChangeNs)) return choice_;
  if (changes || !chosen_) changed_ns_ = seen.now_ns;
  chosen_ = true;
  choice_ = choice;
  return choice_;
}

}  // namespace cudasched::schedule
