#include "runtime/courtesy.hpp"

#include <time.h>

#include "base/clock.hpp"
#include "runtime/gate.hpp"

namespace cudasched::runtime {

void Courtesy::enter() noexcept {
  if (open_.fetch_add(1, std::memory_order_relaxed) == 0) since_ns_.store(now_ns(), std::memory_order_relaxed);
}

void Courtesy::stand_aside(std::atomic<std::uint64_t>& count) const noexcept {
  const std::int64_t until_ns = since_ns_.load(std::memory_order_relaxed) + longest_ns_.load(std::memory_order_relaxed);
  if (!asked() || now_ns() >= until_ns || holds_gil()) return;
  count.fetch_add(1, std::memory_order_relaxed);
  constexpr timespec kPause{0, kPauseNs};
  // Not by a wake-up: the thread that leaves the region has better things to do, and this one is in no hurry.
  while (asked() && now_ns() < until_ns) nanosleep(&kPause, nullptr);
}

}  // namespace cudasched::runtime
