#include "runtime/host_backoff.hpp"

#include "base/clock.hpp"
#include "base/sleep.hpp"
#include "queue/queue.hpp"
#include "runtime/gate.hpp"

namespace cudasched::runtime {

void HostBackoff::enter() noexcept {
  if (open_.fetch_add(1, std::memory_order_relaxed) == 0) since_ns_.store(now_ns(), std::memory_order_relaxed);
}

bool HostBackoff::Enough::is_in(const queue::Queue& queue) const noexcept {
  return queue.queued() >= operations || queue.queued_ns() >= gpu_ns;
}

void HostBackoff::back_off(std::atomic<std::uint64_t>& count, const queue::Queue* queue,
                           std::int64_t bounds) const noexcept {
  const std::int64_t longest_ns = longest_ns_.load(std::memory_order_relaxed);
  const bool while_fed = while_fed_.load(std::memory_order_relaxed);
  const auto wanted = [&](std::int64_t now, const Enough& enough) {
    return requested() && now < since_ns_.load(std::memory_order_relaxed) + longest_ns &&
           (!while_fed || (queue != nullptr && enough.is_in(*queue)));
  };
  const std::int64_t begin = now_ns();
  if (!wanted(begin, kFed) || holds_gil()) return;
  count.fetch_add(1, std::memory_order_relaxed);
  // Polled: a wake-up would cost the thread that leaves the region a system call.
  for (std::int64_t now = begin; now < begin + bounds * longest_ns && wanted(now, kHungry); now = now_ns()) {
    sleep_ns(kPauseNs);
  }
}

}  // namespace cudasched::runtime
