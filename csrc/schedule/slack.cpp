#include "schedule/slack.hpp"

#include <algorithm>

namespace cudasched::schedule {

void RegionHistory::observe(std::int64_t time_ns, std::int64_t admitted_ns) noexcept {
  since_clean_ = admitted_ns > 0 ? since_clean_ + 1 : 0;
  if (admitted_ns > 0) return;
  times_[next_] = std::max<std::int64_t>(time_ns, 0);
  next_ = (next_ + 1) % kTimes;
  count_ = std::min(count_ + 1, kTimes);
  if (count_ < kFewest) return;
  auto sorted = times_;
  const auto p90 = sorted.begin() + static_cast<std::ptrdiff_t>((9 * count_ + 9) / 10 - 1);
  std::nth_element(sorted.begin(), p90, sorted.begin() + static_cast<std::ptrdiff_t>(count_));
  p90_ns_ = *p90;
}

std::int64_t remaining_ns(std::int64_t expected_ns, std::int64_t passed_ns) noexcept {
  const bool known = expected_ns != Snapshot::kUnknownNs && passed_ns <= expected_ns;
  return known ? expected_ns - passed_ns : Snapshot::kUnknownNs;
}

std::int64_t least_slack_ns(std::span<const Request> requests, std::int64_t now_ns) noexcept {
  if (requests.empty()) return Snapshot::kUnknownNs;
  const auto urgent = std::min_element(requests.begin(), requests.end(), [](const Request& one, const Request& other) {
    return one.deadline_ns < other.deadline_ns;
  });
  const auto needs = [&](const Request& request) {
    return &request == &*urgent ? request.remaining_ns : std::max(request.remaining_ns, request.expected_ns);
  };
  std::int64_t least_ns = Snapshot::kLongAgoNs;
  for (const Request& request : requests) {
    if (request.deadline_ns == 0 || request.remaining_ns == Snapshot::kUnknownNs) return Snapshot::kUnknownNs;
    std::int64_t needed_ns = 0;
    for (const Request& other : requests) {
      if (other.remaining_ns == Snapshot::kUnknownNs) return Snapshot::kUnknownNs;
      if (other.deadline_ns <= request.deadline_ns) needed_ns += needs(other);
    }
    least_ns = std::min(least_ns, request.deadline_ns - now_ns - needed_ns);
  }
  return least_ns;
}

std::int64_t admission_cost_ns(std::int64_t longest_ns, std::int64_t in_flight_ns, std::int64_t switch_ns) noexcept {
  return longest_ns + (in_flight_ns > 0 ? 0 : 2 * switch_ns);
}

}  // namespace cudasched::schedule
