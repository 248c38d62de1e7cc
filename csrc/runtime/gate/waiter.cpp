#include "runtime/gate/waiter.hpp"

#include <sched.h>

#include <algorithm>
#include <mutex>

#include "base/clock.hpp"
#include "base/processor.hpp"
#include "base/sleep.hpp"
#include "runtime/hot.hpp"

namespace cudasched::runtime {
namespace {

std::uint64_t bit(int slot) noexcept { return std::uint64_t{1} << slot; }

}  // namespace

void Waiter::spin(std::int64_t duration_ns) noexcept {
  const std::int64_t until_ns = now_ns() + duration_ns;
  while (now_ns() < until_ns) {
    for (int i = 0; i < 16; ++i) spin_pause();
  }
  sched_yield();
}

void Waiter::wait_for_time(std::int64_t wait_ns, std::int64_t next_end_ns, std::int64_t slack_ns,
                           schedule::SleepPlan& plan) noexcept {
  const std::int64_t begin_ns = now_ns();
  if (const std::int64_t asleep_ns = plan.sleep_ns(wait_ns, next_end_ns, slack_ns); asleep_ns > 0) {
    sleep_ns(asleep_ns);
    plan.woke(now_ns() - begin_ns - asleep_ns);
    return;
  }
  spin(std::min(wait_ns, kPollNs));
}

void Waiter::begin(bool announced, Wait& wait) noexcept {
  if (!wait.started) {
    wait.started = true;
    wait.since_ns = wait.reaped_ns = now_ns();
  }
  if (announced && !wait.announced) announce();
  if (!announced && wait.announced) leave();
  wait.announced = announced;
}

void Waiter::reap(Wait& wait) noexcept {
  const std::int64_t now = now_ns();
  if (now - wait.reaped_ns <= kReapNs) return;
  wait.reaped_ns = now;
  table_->reap();
  if (peers_ != nullptr) peers_->reap();
}

// The bit stands for all threads of the process that wait; the last one takes it away.
void Waiter::announce() noexcept {
  {
    const std::scoped_lock lock(lock_);
    if (announced_++ != 0) return;
    const int slot = slot_.load(std::memory_order_relaxed);
    table_->slot(slot).heartbeat_ns.store(now_ns(), std::memory_order_relaxed);  // or no peer believes it
    table_->layout().waiting.fetch_or(bit(slot));
  }
  hot().ticker.wake();
}

void Waiter::leave() noexcept {
  const std::scoped_lock lock(lock_);
  if (--announced_ == 0) table_->layout().waiting.fetch_and(~bit(slot_.load(std::memory_order_relaxed)));
}

void Waiter::write_again() noexcept {
  const std::scoped_lock lock(lock_);
  const std::uint64_t self = bit(slot_.load(std::memory_order_relaxed));
  auto& waiting = table_->layout().waiting;
  if (announced_ > 0) {
    if ((waiting.load() & self) == 0) waiting.fetch_or(self);
  } else if ((waiting.load() & self) != 0) {
    waiting.fetch_and(~self);
  }
}

}  // namespace cudasched::runtime
