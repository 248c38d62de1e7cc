// How many lines of a level are written: some at once, then one an interval. Told the time; any thread, no lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace cudasched::log {

class Limit {
 public:
  // `burst` lines at once, then one each `interval_ns`.
  constexpr Limit(int burst, std::int64_t interval_ns) noexcept
      : interval_ns_(interval_ns), ahead_ns_((burst - 1) * interval_ns) {}

  // Whether a line may be written now; counted if not.
  bool admit(std::int64_t now_ns) noexcept {
    std::int64_t next_ns = next_ns_.load(std::memory_order_relaxed);
    for (;;) {
      if (next_ns != kNever && next_ns - now_ns > ahead_ns_) {
        left_out_.fetch_add(1, std::memory_order_relaxed);
        return false;
      }
      const std::int64_t after_ns = (next_ns == kNever ? now_ns : std::max(next_ns, now_ns)) + interval_ns_;
      if (next_ns_.compare_exchange_weak(next_ns, after_ns, std::memory_order_relaxed)) return true;
    }
  }

  // The number of lines left out since the last call.
  std::uint64_t take_left_out() noexcept { return left_out_.exchange(0, std::memory_order_relaxed); }

 private:
  static constexpr std::int64_t kNever = INT64_MIN;

  const std::int64_t interval_ns_;
  const std::int64_t ahead_ns_;
  std::atomic<std::int64_t> next_ns_{kNever};  // when the lines written so far are paid for
  std::atomic<std::uint64_t> left_out_{0};
};

}  // namespace cudasched::log
