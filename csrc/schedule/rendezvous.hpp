// When a collective of a job may be submitted while a latency client is on one of the job's GPUs.
//
// A collective that runs on one GPU and waits there for a member whose gate is closed takes time slices from requests
// for as long as the gate stays closed. So members submit a collective together: the first one at a gate waits for the
// others. Once a member has submitted the collective, the others follow at once, even through a closed gate: the
// collective itself then costs the request time, not the wait.
//
// Members need not run the same collectives (subgroups, pipelines), so members wait for another one no longer than
// kLongestNs. After kMissesInARow such misses the rule is off for a while, each time for twice as long. Nothing is
// agreed: each member publishes one word, twice the collectives that it has submitted, plus 1 while the next one is at
// its gate.
//
// Pure: no clock, no driver. Not thread-safe: the caller holds a lock.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cudasched::schedule {

// The other members' published words.
struct JobProgress {
  std::uint64_t least_arrived = ~std::uint64_t{0};  // collectives that have reached the gate of the last member
  std::uint64_t most_submitted = 0;                 // collectives that some member has submitted

  void add(std::uint64_t word) noexcept {
    least_arrived = std::min(least_arrived, word / 2 + word % 2);
    most_submitted = std::max(most_submitted, word / 2);
  }
};

class Rendezvous {
 public:
  static constexpr std::int64_t kLongestNs = 20'000'000;
  static constexpr int kMissesInARow = 3;
  static constexpr std::int64_t kFirstOffNs = 100'000'000;
  static constexpr std::int64_t kLongestOffNs = 60'000'000'000;

  enum class Verdict : std::uint8_t {
    kWait,    // for the other members, whatever the policy says
    kPolicy,  // as for any other launch
    kNow,     // a member has submitted it: now, whatever the policy says
  };

  // This member's word.
  std::uint64_t word() const noexcept { return 2 * submitted_ + (arrived_ns_ != 0 ? 1 : 0); }

  // The next collective is at the gate.
  void arrive(std::int64_t now_ns) noexcept { arrived_ns_ = now_ns; }

  // At each look of the collective that waits.
  Verdict look(const JobProgress& others, std::int64_t now_ns) noexcept {
    if (others.most_submitted > submitted_) return Verdict::kNow;
    if (others.least_arrived > submitted_ || now_ns < off_until_ns_) return Verdict::kPolicy;
    if (now_ns - arrived_ns_ < kLongestNs) return Verdict::kWait;
    missed_ = true;
    return Verdict::kPolicy;
  }

  // It is submitted, or was without a look. True: another member was not there in time.
  bool submitted(std::int64_t now_ns) noexcept {
    ++submitted_;
    arrived_ns_ = 0;
    const bool missed = missed_;
    missed_ = false;
    if (!missed) {
      if (now_ns >= off_until_ns_) misses_ = 0;
      return false;
    }
    if (++misses_ >= kMissesInARow) {
      off_until_ns_ = now_ns + off_ns_;
      off_ns_ = std::min(2 * off_ns_, kLongestOffNs);
    }
    return true;
  }

 private:
  std::uint64_t submitted_ = 0;
  std::int64_t arrived_ns_ = 0;  // 0: none is at the gate
  bool missed_ = false;
  int misses_ = 0;
  std::int64_t off_until_ns_ = 0;
  std::int64_t off_ns_ = kFirstOffNs;
};

}  // namespace cudasched::schedule
