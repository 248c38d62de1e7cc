#include "schedule/batching.hpp"

#include <algorithm>
#include <vector>

namespace cudasched::schedule {
namespace {

std::int64_t bound_ns(const BatchView& view, std::size_t count) noexcept {
  const auto size = std::lower_bound(view.sizes.begin(), view.sizes.end(), static_cast<std::int64_t>(count));
  return view.bounds_ns[static_cast<std::size_t>(size - view.sizes.begin())];
}

// Does a batch of `count` serve more requests per second than one of `other`?
bool gains(const BatchView& view, std::size_t count, std::size_t other) noexcept {
  return static_cast<double>(count) * static_cast<double>(bound_ns(view, other)) >
         static_cast<double>(other) * static_cast<double>(bound_ns(view, count));
}

// Do batches of `count`, one after another, serve the arrivals in one `part`th of the time?
bool keeps_up(const BatchView& view, std::size_t count, std::int64_t part) noexcept {
  return view.gap_ns / part >= bound_ns(view, count) / static_cast<std::int64_t>(count);
}

// Can other processes' requests wait for a batch of `count`, or not even for the smallest?
bool fits(const BatchView& view, std::size_t count) noexcept {
  return view.slack_ns < bound_ns(view, 1) || bound_ns(view, count) <= view.slack_ns;
}

std::int64_t earliest(std::span<const std::int64_t> deadlines_ns) noexcept {
  return *std::min_element(deadlines_ns.begin(), deadlines_ns.end());
}

// Of the requests whose deadlines these are, how many a batch that starts at `start_ns` takes.
std::size_t fill(const BatchView& view, std::span<const std::int64_t> deadlines_ns, std::int64_t start_ns) noexcept {
  const std::size_t most = std::min(view.most, deadlines_ns.size());
  if (view.policy != BatchPolicy::kDeadline) return most;
  std::size_t best = 1;
  std::int64_t earliest_ns = deadlines_ns[0];
  for (std::size_t count = 2; count <= most && fits(view, count); ++count) {
    earliest_ns = std::min(earliest_ns, deadlines_ns[count - 1]);
    const bool in_time = earliest_ns == kNeverNs || start_ns + bound_ns(view, count) <= earliest_ns;
    if (!in_time && keeps_up(view, best, 1)) break;
    if (!gains(view, best, count)) best = count;
  }
  return best;
}

struct Plan {
  std::int64_t end_ns = 0;  // of the request at `place`
  std::size_t late = 0;     // of the first `count` requests, without the one at `place`
};

Plan plan(const BatchView& view, std::span<const std::int64_t> deadlines_ns, std::size_t place, std::size_t count) {
  Plan made;
  std::int64_t end_ns = view.now_ns;
  for (std::size_t first = 0; first < std::max(count, std::min(place + 1, deadlines_ns.size()));) {
    const std::size_t after = first + fill(view, deadlines_ns.subspan(first), end_ns);
    end_ns += bound_ns(view, after - first);
    for (; first < after; ++first) {
      if (first == place) {
        made.end_ns = end_ns;
      } else if (first < count && end_ns > deadlines_ns[first]) {
        ++made.late;
      }
    }
  }
  return made;
}

}  // namespace

BatchDecision next_batch(const BatchView& view) noexcept {
  const std::size_t waiting = view.deadlines_ns.size();
  if (waiting == 0) return {};
  const std::size_t count = fill(view, view.deadlines_ns, view.now_ns);
  const BatchDecision start{count, kNeverNs};
  if (count < waiting || count == view.most || view.policy == BatchPolicy::kEager ||
      view.policy == BatchPolicy::kAimd) {
    return start;
  }
  const std::int64_t earliest_ns = earliest(view.deadlines_ns);
  if (view.policy == BatchPolicy::kDelay) {
    const std::int64_t latest_ns =
        earliest_ns == kNeverNs ? kNeverNs : earliest_ns - bound_ns(view, count) - view.margin_ns;
    const std::int64_t look_ns = std::min(earliest(view.arrivals_ns) + view.delay_ns, latest_ns);
    return look_ns > view.now_ns ? BatchDecision{0, look_ns} : start;
  }
  if (earliest_ns == kNeverNs || view.gap_ns >= earliest_ns - view.now_ns || keeps_up(view, count, kSpare))
    return start;
  const std::int64_t quiet_ns =
      *std::max_element(view.arrivals_ns.begin(), view.arrivals_ns.end()) + kQuietGaps * view.gap_ns;
  for (std::size_t size = count + 1; size <= view.most; ++size) {
    const std::int64_t missing_ns = static_cast<std::int64_t>(size - count) * view.gap_ns;
    const std::int64_t latest_ns = earliest_ns - bound_ns(view, size) * 3 / 2 - view.margin_ns;
    const std::int64_t look_ns = std::min(quiet_ns, latest_ns - missing_ns);
    if (look_ns <= view.now_ns || !fits(view, size)) break;
    if (gains(view, size, count)) return {0, look_ns};
  }
  return start;
}

RequestAdmission admit_request(const BatchView& view, std::size_t place, std::int64_t deadline_ns,
                               std::size_t protected_count) {
  std::vector<std::int64_t> with(view.deadlines_ns.begin(), view.deadlines_ns.end());
  with.insert(with.begin() + static_cast<std::ptrdiff_t>(place), deadline_ns);
  const Plan planned = plan(view, with, place, protected_count + (place < protected_count ? 1 : 0));
  const std::size_t late = planned.late == 0 ? 0 : plan(view, view.deadlines_ns, with.size(), protected_count).late;
  return {planned.end_ns, planned.late > late};
}

double aimd_limit(double limit, bool full, bool in_time, double most) noexcept {
  const double next = !in_time ? 0.9 * limit : full ? limit + 1 : limit;
  return std::clamp(next, 1.0, most);
}

}  // namespace cudasched::schedule
