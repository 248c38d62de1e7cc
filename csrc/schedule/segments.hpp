// The segments of a latency client's requests (segment_profile.hpp), one request at a time: the segment under way, the
// gates' news of it, and the time by which best effort may delay its end.
//
// A request is known by a key (its region's name and latency target), and a segment by its number in the request.
// Segments from the ninth on are taken for alike, as the tokens of a decoder are. There is room for kKeys keys.
//
// Only segments without best effort show the cost of best effort. One segment in kCleanPeriod is kept clean, one in
// kTrialPeriod while the last two verdicts were alike, and each is compared with the median of the segments of its kind
// just before it. For hosts are faster and slower by turns, by more than best effort may cost. Segments may lose half
// of the target by prediction, since predictions err. This share halves each time that kVerdict more of the pairs
// exceed the target than keep within half of it, and doubles back in the opposite case. Where contexts take turns,
// changing to the other one and back comes on top of the target.
//
// With a deadline (policy `slack`), a segment may lose no more than the slack that its request has left.
//
// Any thread may call launch(), as long as begin() or end() of its request is not under way. launch() takes no lock and
// allocates nothing. The rest is for one thread at a time. Pure: no clock, no driver. A megabyte, allocated by the
// constructor.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "schedule/admission.hpp"
#include "schedule/segment_profile.hpp"

namespace cudasched::schedule {

class Segments {
 public:
  static constexpr std::size_t kKeys = 6;
  static constexpr std::size_t kNumbers = 9;
  // Primes: those that are kept clean are of all positions where a request has more than kNumbers segments.
  static constexpr std::uint64_t kCleanPeriod = 61;
  static constexpr std::uint64_t kTrialPeriod = 17;
  static constexpr std::uint64_t kNotedPeriod = 17;    // one segment in so many has the times of its launches noted
  static constexpr std::size_t kTimedPeriod = 8;       // of a timed one, one launch in so many is measured
  static constexpr int kVerdict = 5;                   // pairs that speak for the same, more than against it
  static constexpr std::size_t kFewestOthers = 8;      // segments before a clean one that make a pair with it
  static constexpr std::uint64_t kRetryPeriod = 1024;  // of segments, where nothing is let in any more
  static constexpr double kMostShare = 1.0 / 2;        // of the target, that segments may lose by prediction
  static constexpr double kLeastShare = 1.0 / 64;      // of the target; below, nothing is let in

  // `inflation`: how much longer a segment may take, 1.03 for 3%.
  explicit Segments(double inflation);

  // A gate's news of a segment that begins.
  struct SegmentNews {
    std::uint64_t segment = 0;  // how many have begun, ever
    std::int64_t since_ns = 0;
    std::int64_t late_ns = 0;  // 0: nothing is to be let in
    std::int64_t median_ns = 0;
    std::uint64_t left = kNothingKnown;
  };

  struct Counts {
    std::uint64_t clean = 0;      // segments that were kept clean
    std::uint64_t halved = 0;     // times that the share was halved
    std::uint64_t fallbacks = 0;  // times that a profile misled, and was forgotten
  };

  // A request's deadline, and the request's time by itself; where that time is not known, the request is kept clean.
  struct Target {
    std::int64_t deadline_ns = 0;  // 0: none
    std::int64_t expected_ns = Snapshot::kUnknownNs;
    std::int64_t margin_ns = 0;  // the part of the slack left alone
    bool alone = false;          // no best effort is there: it is clean in any case
  };

  // A request begins. No allocation, and nothing is cleared: one with a new key is not known. `sliced`: best effort of
  // another context takes turns with it on the GPU, so that a segment pays two changes of contexts in any case. With a
  // target, gates hear of a segment only as far as the target leaves it slack. The target says which requests are
  // clean. Other segments that gates do not hear of teach nothing: another rule lets best effort into them.
  SegmentNews begin(std::uint64_t key, std::int64_t now_ns, bool sliced = false,
                    const std::optional<Target>& target = std::nullopt) noexcept;

  // The next launch of the segment: its GPU time, and the rest of the segment behind it. `now()` is asked only where
  // the request's launches are noted.
  struct Launch {
    std::size_t number = 0;
    std::int64_t gpu_ns = 0;
    std::uint64_t left = kNothingKnown;
    bool is_timed = false;  // it is to be measured
  };
  template <typename Now>
  Launch launch(Now&& now) noexcept {
    const std::size_t number = launches_.fetch_add(1, std::memory_order_relaxed);
    const SegmentProfile* const profile = profile_.load(std::memory_order_acquire);
    if (profile == nullptr) return {number, 0, kNothingKnown, false};
    const bool noted = noted_.load(std::memory_order_relaxed);
    if (noted && number < SegmentProfile::kLaunches) launched_ns_[number].store(now(), std::memory_order_relaxed);
    const bool timed = number % kTimedPeriod == phase_.load(std::memory_order_relaxed);
    return {number, profile->gpu_ns(number), profile->known() ? profile->left(number + 1) : kNothingKnown, timed};
  }

  // The GPU time of a timed launch of the segment under way.
  void took(std::size_t number, std::int64_t gpu_ns) noexcept;

  // The program waits for the GPU from now on.
  void waits(std::int64_t now_ns) noexcept { waited_ns_.store(now_ns, std::memory_order_relaxed); }

  // It has waited, and the next segment begins; `told` is left alone where nothing was launched since the last time.
  bool next(std::int64_t now_ns, SegmentNews& told) noexcept;

  // The request is over.
  void end(std::int64_t now_ns) noexcept;

  // Of the request under way nothing is known: it is not the only one.
  void lose() noexcept;

  const Counts& counts() const noexcept { return counts_; }

 private:
  struct Key {
    std::uint64_t key = 0;
    bool used = false;
    double share = kMostShare;
    int against = 0;           // pairs in which segments took too long, less those in which they did not
    bool on_trial = true;      // the last two verdicts were alike, or there were not two
    bool was_too_long = true;  // the last verdict
  };

  // Segments of one number of one key's requests. Each kind counts its own: where requests have several segments, every
  // so many of all would always be the same kind.
  struct Kind {
    SegmentProfile profile;
    RecentMedian others;      // times of the last segments that best effort may have been in
    std::uint64_t begun = 0;  // that were known when they began
    std::uint64_t clean = 0;  // and were kept clean
    std::size_t phase = 0;    // which launches were measured last, of kTimedPeriod
  };

  static constexpr int kNone = -1;

  int find(std::uint64_t key) const noexcept;
  int make_room(std::uint64_t key) noexcept;
  SegmentNews start(std::int64_t now_ns) noexcept;
  void observe(std::int64_t now_ns) noexcept;
  // By how much a segment that begins may end later, for its request's target: 0 or less where it has to be left alone.
  std::int64_t slack_ns(const SegmentProfile& profile, std::int64_t now_ns) const noexcept;
  // A clean segment and the others of its kind before it.
  void judge(Key& key, RecentMedian& others, std::int64_t clean_ns) noexcept;
  Kind& kind(int key, std::size_t number) noexcept {
    return kinds_[static_cast<std::size_t>(key) * kNumbers + std::min(number, kNumbers - 1)];
  }

  double target_share_;  // of a segment, by which it may take longer
  std::unique_ptr<Kind[]> kinds_;
  std::array<Key, kKeys> keys_{};
  std::size_t replaced_ = 0;
  Counts counts_;

  // The request under way.
  int key_ = kNone;
  std::uint64_t wanted_ = 0;  // the key of a request that has no place yet
  bool under_way_ = false;
  bool sliced_ = false;
  std::optional<Target> target_;
  std::int64_t done_ns_ = 0;  // expected time of the request's segments so far, by themselves
  bool teaches_ = true;       // the work in the segment is known
  bool timed_ = false;        // launches of the segment are measured
  std::size_t number_ = 0;
  std::uint64_t segment_ = 0;
  std::int64_t began_ns_ = 0;
  std::atomic<std::int64_t> late_ns_{0};
  std::atomic<std::int64_t> waited_ns_{0};
  std::atomic<const SegmentProfile*> profile_{nullptr};
  std::atomic<std::size_t> launches_{0};
  std::atomic<bool> noted_{false};
  std::atomic<std::size_t> phase_{kTimedPeriod};  // which launches are measured; kTimedPeriod: none
  std::array<std::atomic<std::int64_t>, SegmentProfile::kLaunches> launched_ns_{};
};

}  // namespace cudasched::schedule
