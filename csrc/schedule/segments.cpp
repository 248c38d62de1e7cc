#include "schedule/segments.hpp"

namespace cudasched::schedule {

Segments::Segments(double inflation)
    : inflation_(std::max(inflation, 0.0)), profiles_(std::make_unique<SegmentProfile[]>(kKeys * kNumbers)) {}

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
  for (std::size_t number = 0; number < kNumbers; ++number) profile(place, number).clear();
  return place;
}

double Segments::share(std::uint64_t key) const noexcept {
  const int place = find(key);
  return place == kNone ? 1.0 : keys_[static_cast<std::size_t>(place)].share;
}

Segments::Told Segments::begin(std::uint64_t key, std::int64_t now) noexcept {
  key_ = find(key);
  wanted_ = key;
  under_way_ = true;
  number_ = 0;
  let_in_ = false;
  clean_ = true;
  request_began_ns_ = now;
  bool noted = false;
  if (key_ != kNone) {
    Key& known = keys_[static_cast<std::size_t>(key_)];
    const std::uint64_t request = known.requests++;
    if (known.share < kLeastShare && request % kRetryPeriod == 0) {
      known.share = kLeastShare;
      known.others = {};
    }
    clean_ = request % kCleanPeriod == 0 || known.share < kLeastShare;
    if (clean_ && profile(key_, 0).known()) ++counts_.clean;
    noted = request % kNotedPeriod == 1 || !profile(key_, 0).known();
    if (noted) time_others(known);
  }
  noted_.store(noted, std::memory_order_relaxed);
  return start(now);
}

Segments::Told Segments::start(std::int64_t now) noexcept {
  Told told;
  told.segment = ++segment_;
  told.since_ns = began_ns_ = now;
  waited_ns_.store(0, std::memory_order_relaxed);
  launches_.store(0, std::memory_order_relaxed);
  late_ns_.store(0, std::memory_order_relaxed);
  if (key_ == kNone) {
    profile_.store(nullptr, std::memory_order_release);
    return told;
  }
  Key& key = keys_[static_cast<std::size_t>(key_)];
  const SegmentProfile& known = profile(key_, number_);
  // The times of a segment that is not known yet are noted in any request.
  if (!known.known() && !noted_.load(std::memory_order_relaxed)) {
    time_others(key);
    noted_.store(true, std::memory_order_relaxed);
  }
  told.median_ns = known.median_ns();
  // Without what launches take, a gate could not tell what latency work has on the GPU.
  if (!clean_ && known.known())
    told.late_ns = static_cast<std::int64_t>(inflation_ * key.share * static_cast<double>(told.median_ns));
  late_ns_.store(told.late_ns, std::memory_order_relaxed);
  if (told.late_ns > 0) {
    let_in_ = true;
    told.left = known.left(0);
  }
  profile_.store(&known, std::memory_order_release);
  return told;
}

void Segments::time_others(Key& key) noexcept {
  key.phase = (key.phase + 1) % kTimedPeriod;
  phase_.store(key.phase, std::memory_order_relaxed);
}

void Segments::took(std::size_t number, std::int64_t gpu_ns) noexcept {
  if (key_ != kNone) profile(key_, number_).took(number, gpu_ns);
}

// The segment under way is over.
void Segments::observe(std::int64_t now) noexcept {
  if (key_ == kNone) return;
  std::array<std::int64_t, SegmentProfile::kLaunches> launched_ns;
  SegmentProfile::Seen seen;
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
  if (seen.waited_ns < began_ns_ || seen.waited_ns > now) {
    // It was not seen to wait, so that it is not known how long it was blocked.
    if (seen.launched_ns.empty()) return;
    seen.waited_ns = std::clamp(seen.launched_ns.back(), began_ns_, now);
  }
  if (profile(key_, number_).observe(seen)) ++counts_.fallbacks;
}

bool Segments::next(std::int64_t now, Told& told) noexcept {
  if (!under_way_ || launches_.load(std::memory_order_relaxed) == 0) return false;
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

void Segments::end(std::int64_t now, bool learn) noexcept {
  if (!under_way_) return;
  if (learn && launches_.load(std::memory_order_relaxed) > 0) observe(now);
  if (learn && key_ != kNone) {
    Key& key = keys_[static_cast<std::size_t>(key_)];
    (let_in_ ? key.others : key.clean).add(now - request_began_ns_);
    if (let_in_ && ++key.judged >= kJudgedPeriod) judge(key);
  }
  if (learn && key_ == kNone) make_room(wanted_);
  lose();
}

void Segments::judge(Key& key) noexcept {
  key.judged = 0;
  const auto clean = static_cast<double>(key.clean.ns());
  const auto others = static_cast<double>(key.others.ns());
  if (clean <= 0) return;
  if (others > (1 + inflation_) * clean) {
    key.share /= 2;
    key.calm = 0;
    key.others = {};
    ++counts_.halved;
  } else if (++key.calm >= kCalmJudgements) {
    key.calm = 0;
    key.share = std::min(1.0, 2 * key.share);
  }
}

}  // namespace cudasched::schedule
