#include "schedule/segment_profile.hpp"

#include <bit>
#include <limits>

namespace cudasched::schedule {
namespace {

std::uint32_t word(std::int64_t time_ns) noexcept {
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(time_ns, 0, std::numeric_limits<std::uint32_t>::max()));
}

constexpr double kWhole = 1 << 30;  // a segment's host time, as shares of it are kept

}  // namespace

void RecentMedian::add(std::int64_t time_ns) noexcept {
  times_[next_] = std::max<std::int64_t>(time_ns, 0);
  next_ = (next_ + 1) % kTimes;
  count_ = std::min(count_ + 1, kTimes);
  auto sorted = times_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>((count_ - 1) / 2);
  std::nth_element(sorted.begin(), middle, sorted.begin() + static_cast<std::ptrdiff_t>(count_));
  median_ns_ = *middle;
}

void SegmentProfile::took(std::size_t number, std::int64_t gpu_ns) noexcept {
  if (number >= kLaunches || gpu_ns <= 0) return;
  std::uint32_t& known = measured_ns_[number];
  known = known == 0 ? word(gpu_ns) : word(known + (gpu_ns - static_cast<std::int64_t>(known)) / 4);
}

bool SegmentProfile::usual(std::size_t launches) const noexcept {
  const std::size_t margin = std::max<std::size_t>(2, launches_ / 16);
  return launches <= launches_ + margin && launches + margin >= launches_;
}

// Segments that have become shorter are believed after a few in a row, longer ones at once. Host times of those of
// another number of launches say nothing of these: a first request waits where later ones do not.
void SegmentProfile::count_launches(std::size_t launches) noexcept {
  if (launches < launches_) {
    most_of_shorter_ = std::max(most_of_shorter_, launches);
    if (++shorter_ < kFewest) return;
    launches = most_of_shorter_;
  }
  if (!usual(launches)) {
    noted_.fill(false);
    seen_ = 0;
  }
  launches_ = launches;
  shorter_ = 0;
  most_of_shorter_ = 0;
}

bool SegmentProfile::surprising(const PastSegment& seen) const noexcept {
  if (!usual(seen.launches)) return true;
  // The program came to its wait much sooner than it was to.
  if (4 * (seen.waited_ns - seen.began_ns) < 3 * told_host_ns_) return true;
  // The program waited for much longer than the work let in accounts for.
  const std::int64_t allowed_ns = blocked_.ns() + 2 * seen.late_ns + median_ns() / 4;
  return !seen.clean && seen.ended_ns - seen.waited_ns > allowed_ns;
}

void SegmentProfile::forget() noexcept {
  const int needed = std::min(2 * needed_, kMost);
  clear();
  needed_ = needed;
}

void SegmentProfile::clear() noexcept {
  known_.store(false, std::memory_order_release);
  for (auto& left : left_) left.store(kNothingKnown, std::memory_order_relaxed);
  for (auto& gpu : gpu_ns_) gpu.store(0, std::memory_order_relaxed);
  measured_ns_.fill(0);
  host_share_.fill(0);
  noted_.fill(false);
  launches_ = most_of_shorter_ = 0;
  shorter_ = seen_ = 0;
  needed_ = kFewest;
  surprises_ = 0;
  host_ = {};
  told_host_ns_ = 0;
  clean_ = {};
  blocked_ = {};
}

bool SegmentProfile::observe(const PastSegment& seen) noexcept {
  if (seen.launches == 0 || seen.launches > kLaunches) {
    const bool was_known = known();
    if (was_known) forget();
    return was_known;
  }
  const bool surprise = known() && surprising(seen);
  if (known()) {
    surprises_ = static_cast<std::uint8_t>(surprises_ << 1 | (surprise ? 1 : 0));
    if (std::popcount(surprises_) >= kMostSurprises) {
      forget();
      return true;
    }
  }
  if (!surprise) {
    if (seen.clean) {
      clean_.add(seen.ended_ns - seen.began_ns);
      blocked_.add(seen.ended_ns - seen.waited_ns);
    }
    count_launches(seen.launches);
  }
  if (!usual(seen.launches)) return false;  // of another kind: nothing is to be learned from it
  host_.add(seen.waited_ns - seen.began_ns);
  const bool learns = !surprise && !seen.launched_ns.empty();
  if (learns) learn_host(seen);
  if (learns || host_.ns() != told_host_ns_) publish();
  return false;
}

void SegmentProfile::learn_host(const PastSegment& seen) noexcept {
  const auto whole_ns = static_cast<double>(std::max<std::int64_t>(seen.waited_ns - seen.began_ns, 1));
  for (std::size_t number = 0; number < std::min(seen.launches, seen.launched_ns.size()); ++number) {
    const double share = static_cast<double>(seen.waited_ns - seen.launched_ns[number]) / whole_ns;
    const auto left = static_cast<std::uint32_t>(kWhole * std::clamp(share, 0.0, 1.0));
    std::uint32_t& median = host_share_[number];
    const std::uint32_t step = std::max<std::uint32_t>(median / 64, 1);
    if (!noted_[number]) {
      median = left;
      noted_[number] = true;
    } else {
      median = left < median ? std::max(left, median - step) : std::min(left, median + step);
    }
  }
  seen_ = std::min(seen_ + 1, kMost);
}

void SegmentProfile::publish() noexcept {
  std::int64_t sum_ns = 0;
  std::size_t measured = 0;
  for (std::size_t number = 0; number < launches_; ++number) {
    if (measured_ns_[number] == 0) continue;
    ++measured;
    sum_ns += measured_ns_[number];
  }
  if (measured == 0) return;
  const auto mean = static_cast<std::uint32_t>(sum_ns / static_cast<std::int64_t>(measured));
  told_host_ns_ = host_.ns();
  // After the last launch, nothing; beyond it, nothing is known.
  for (std::size_t launched = launches_ + 1; launched <= kLaunches; ++launched) {
    if (left_[launched].exchange(kNothingKnown, std::memory_order_relaxed) == kNothingKnown) break;
  }
  TimeLeft left;
  left_[launches_].store(pack(left), std::memory_order_relaxed);
  for (std::size_t number = launches_; number-- > 0;) {
    const std::uint32_t gpu = measured_ns_[number] != 0 ? measured_ns_[number] : mean;
    gpu_ns_[number].store(gpu, std::memory_order_relaxed);
    left.gpu_ns += gpu;
    left.host_ns = static_cast<std::int64_t>(static_cast<double>(told_host_ns_) * host_share_[number] / kWhole);
    left_[number].store(pack(left), std::memory_order_relaxed);
  }
  if (seen_ >= needed_ && 8 * measured >= 7 * launches_) known_.store(true, std::memory_order_release);
}

}  // namespace cudasched::schedule
