#include "runtime/host_backoff.hpp"

#include <immintrin.h>
#include <sched.h>
#include <time.h>

#include <algorithm>

#include "base/clock.hpp"
#include "queue/queue.hpp"
#include "runtime/gil.hpp"

namespace cudasched::runtime {

bool HostBackoff::enter() noexcept {
  if (open_.fetch_add(1, std::memory_order_relaxed) > 0) return false;
  since_ns_.store(now_ns(), std::memory_order_relaxed);
  return true;
}

bool HostBackoff::Enough::is_in(const queue::Queue& queue) const noexcept {
  return queue.queued() >= operations || queue.queued_ns() >= gpu_ns;
}

bool HostBackoff::rests(const queue::Queue& queue) const noexcept {
  return resting_.load(std::memory_order_relaxed) > 0 || queue.waiting() > 0;
}

void HostBackoff::give_way(const queue::Queue* queue) noexcept {
  const std::uint64_t launches = launches_.load(std::memory_order_relaxed);
  if (launches < kEager || longest_ns_.load(std::memory_order_relaxed) == 0) return;
  if (queue == nullptr || !kFed.is_in(*queue) || rests(*queue) || !holds_gil()) return;
  const unsigned in_vain = in_vain_.fetch_add(1, std::memory_order_relaxed);
  if (in_vain >= kInVain && in_vain % kTries != 0) return;
  const GilReleased others_run;
  const std::int64_t end = now_ns() + std::min(static_cast<std::int64_t>(launches) * kLostNs, kMostNs);
  while (!rests(*queue) && now_ns() < end) {
    for (int i = 0; i < 16; ++i) _mm_pause();
    sched_yield();
  }
  if (rests(*queue)) in_vain_.store(0, std::memory_order_relaxed);
}

void HostBackoff::back_off(std::atomic<std::uint64_t>& count, const queue::Queue* queue) noexcept {
  const std::int64_t longest_ns = longest_ns_.load(std::memory_order_relaxed);
  const bool while_fed = while_fed_.load(std::memory_order_relaxed);
  const auto wanted = [&](std::int64_t now, const Enough& enough) {
    return requested() && now < since_ns_.load(std::memory_order_relaxed) + longest_ns &&
           (!while_fed || (queue != nullptr && enough.is_in(*queue)));
  };
  const std::int64_t begin = now_ns();
  if (!wanted(begin, kFed) || holds_gil()) return;
  count.fetch_add(1, std::memory_order_relaxed);
  const Resting resting(*this);
  constexpr timespec kPause{0, kPauseNs};
  // Polled: a wake-up would cost the thread that leaves the region a system call.
  for (std::int64_t now = begin; now < begin + kMostBounds * longest_ns && wanted(now, kHungry); now = now_ns()) {
    nanosleep(&kPause, nullptr);
  }
}

}  // namespace cudasched::runtime
