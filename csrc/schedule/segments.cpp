#include "schedule/segments.hpp"

#include <cstdlib>

namespace cudasched::schedule {

Segments::Segments(double inflation)
    : target_share_(std::max(inflation - 1, 0.0)), kinds_(std::make_unique<Kind[]>(kKeys * kNumbers)) {}

int Segments::find(std::uint64_t key) const noexcept {
  for (std::size_t place = 0; place < kKeys; ++place) {
    if (keys_[place].used && keys_[place].key == key) return static_cast<int>(place);
  }
  return kNone;
}

int Segments::make_room(std::uint64_t key) noexcept {
  const int place = static_cast<int>(replaced_);
  replaced_ = (replaced_ + 1) % kKeys;
  keys_[static_cast<std::size_t>(place)] = {};
  keys_[static_cast<std::size_t>(place)].key = key;
  keys_[static_cast<std::size_t>(place)].used = true;
  for (std::size_t number = 0; number < kNumbers; ++number) {
    Kind& of_another = kind(place, number);
    of_another.profile.clear();
    of_another.others = {};
    of_another.begun = of_another.clean = 0;
  }
  return place;
}

Segments::SegmentNews Segments::begin(std::uint64_t key, std::int64_t now, bool sliced,
                                      const std::optional<Target>& target) noexcept {
  key_ = find(key);
  sliced_ = sliced;
  target_ = target;
  done_ns_ = 0;
  wanted_ = key;
  under_way_ = true;
  number_ = 0;
  return start(now);
}

Segments::SegmentNews Segments::start(std::int64_t now) noexcept {
  SegmentNews told;
  told.segment = ++segment_;
  told.since_ns = began_ns_ = now;
  waited_ns_.store(0, std::memory_order_relaxed);
  launches_.store(0, std::memory_order_relaxed);
  late_ns_.store(0, std::memory_order_relaxed);
  timed_ = false;
  teaches_ = true;
  bool noted = false;
  const SegmentProfile* known = nullptr;
  if (key_ != kNone) {
    Key& key = keys_[static_cast<std::size_t>(key_)];
    Kind& kind = this->kind(key_, number_);
    known = &kind.profile;
    told.median_ns = known->median_ns();
    // Without launches' GPU times, a gate could not tell the latency work on the GPU.
    const bool clean_request = target_ && target_->expected_ns == Snapshot::kUnknownNs;
    if (!known->known()) {
      noted = timed_ = teaches_ = !target_ || clean_request || target_->alone;
    } else {
      const std::uint64_t begun = ++kind.begun;
      if (key.share < kLeastShare && begun % kRetryPeriod == 0) {
        key.share = kLeastShare;
        kind.others = {};
      }
      noted = begun % kNotedPeriod == 1;
      const std::uint64_t period = key.on_trial ? kTrialPeriod : kCleanPeriod;
      if (target_ ? clean_request : begun % period == 0) {
        ++counts_.clean;
        // Beside best effort a launch takes longer. Segments whose launches are measured are not compared with others.
        timed_ = ++kind.clean % (key.on_trial ? 8 : 2) == 0;
      } else if (key.share >= kLeastShare) {
        told.late_ns = static_cast<std::int64_t>(target_share_ * key.share * static_cast<double>(told.median_ns));
        if (target_) told.late_ns = std::clamp<std::int64_t>(slack_ns(*known, now), 0, told.late_ns);
      }
      teaches_ = !target_ || clean_request || told.late_ns > 0;
    }
    if (timed_) kind.phase = (kind.phase + 1) % kTimedPeriod;
    phase_.store(timed_ ? kind.phase : kTimedPeriod, std::memory_order_relaxed);
  }
  noted_.store(noted, std::memory_order_relaxed);
  late_ns_.store(told.late_ns, std::memory_order_relaxed);
  if (told.late_ns > 0) told.left = known->left(0);
  profile_.store(known, std::memory_order_release);
  return told;
}

void Segments::took(std::size_t number, std::int64_t gpu_ns) noexcept {
  if (key_ != kNone) kind(key_, number_).profile.took(number, gpu_ns);
}

// The request's earlier segments count with their expected times by themselves, whatever their times in this request.
std::int64_t Segments::slack_ns(const SegmentProfile& profile, std::int64_t now) const noexcept {
  constexpr std::int64_t kMostNs = 3'600'000'000'000;  // more is a damaged word
  std::int64_t until_ns = 0;
  const bool sound = !__builtin_sub_overflow(target_->deadline_ns, now, &until_ns) && until_ns > 0 &&
                     target_->expected_ns >= 0 && target_->expected_ns <= kMostNs;
  if (!sound || !leaves(profile.left(0), sliced_ ? kWorthSwitchingNs : kWorthWakingNs)) return 0;
  const std::int64_t needed_ns = std::max(target_->expected_ns - done_ns_, profile.median_ns());
  return until_ns - needed_ns - target_->margin_ns - (sliced_ ? 2 * kContextSwitchNs : 0);
}

// The segment under way is over.
void Segments::observe(std::int64_t now) noexcept {
  if (key_ == kNone || !teaches_) return;
  std::array<std::int64_t, SegmentProfile::kLaunches> launched_ns;
  SegmentProfile::PastSegment seen;
  seen.began_ns = began_ns_;
  seen.ended_ns = now;
  seen.launches = launches_.load(std::memory_order_relaxed);
  seen.late_ns = late_ns_.load(std::memory_order_relaxed);
  seen.clean = seen.late_ns == 0;
  if (noted_.load(std::memory_order_relaxed)) {
    const std::size_t count = std::min(seen.launches, SegmentProfile::kLaunches);
    for (std::size_t i = 0; i < count; ++i) launched_ns[i] = launched_ns_[i].load(std::memory_order_relaxed);
    seen.launched_ns = std::span(launched_ns).first(count);
  }
  seen.waited_ns = waited_ns_.load(std::memory_order_relaxed);
  const bool launched_since = !seen.launched_ns.empty() && seen.waited_ns < seen.launched_ns.back();
  if (seen.waited_ns < began_ns_ || seen.waited_ns > now || launched_since) {
    // It was not seen to wait for all of it, so that it is not known how long it was blocked.
    if (seen.launched_ns.empty()) return;
    seen.waited_ns = std::clamp(seen.launched_ns.back(), began_ns_, now);
  }
  Kind& kind = this->kind(key_, number_);
  const bool was_known = kind.profile.known();
  if (kind.profile.observe(seen)) ++counts_.fallbacks;
  if (!was_known || timed_ || !kind.profile.known()) return;
  if (!seen.clean) {
    kind.others.add(now - began_ns_);
  } else {
    judge(keys_[static_cast<std::size_t>(key_)], kind.others, now - began_ns_);
  }
}

bool Segments::next(std::int64_t now, SegmentNews& told) noexcept {
  if (!under_way_ || launches_.load(std::memory_order_relaxed) == 0) return false;
  if (key_ != kNone) {
    const std::int64_t median_ns = kind(key_, number_).profile.median_ns();
    done_ns_ += median_ns > 0 ? median_ns : now - began_ns_;
  }
  observe(now);
  ++number_;
  told = start(now);
  return true;
}

void Segments::lose() noexcept {
  key_ = kNone;
  profile_.store(nullptr, std::memory_order_release);
  late_ns_.store(0, std::memory_order_relaxed);
  under_way_ = false;
}

void Segments::end(std::int64_t now) noexcept {
  if (!under_way_) return;
  if (launches_.load(std::memory_order_relaxed) > 0) observe(now);
  if (key_ == kNone) make_room(wanted_);
  lose();
}

void Segments::judge(Key& key, RecentMedian& others, std::int64_t clean_ns) noexcept {
  if (key.share < kLeastShare || others.count() < kFewestOthers || clean_ns <= 0) return;
  const std::int64_t others_ns = others.ns() - (sliced_ ? 2 * kContextSwitchNs : 0);
  const double longer = static_cast<double>(others_ns) / static_cast<double>(clean_ns) - 1;
  const bool too_long = longer > target_share_;
  if (!too_long && longer > target_share_ / 2) return;
  key.against += too_long ? 1 : -1;
  if (std::abs(key.against) < kVerdict) return;
  key.against = 0;
  key.share = too_long ? key.share / 2 : std::min(2 * std::max(key.share, kLeastShare), kMostShare);
  key.on_trial = too_long == key.was_too_long && key.share < kMostShare;
  key.was_too_long = too_long;
  others = {};  // of another share
  counts_.halved += too_long ? 1 : 0;
}

}  // namespace cudasched::schedule
