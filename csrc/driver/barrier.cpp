#include "driver/barrier.hpp"

#include <pthread.h>
#include <sched.h>

#include "base/clock.hpp"
#include "base/futex.hpp"

namespace cudasched::driver {
namespace {

constexpr std::int64_t kLookNs = 50 * kNsPerMs;

pthread_key_t ends;  // of threads that have jumped

}  // namespace

constinit thread_local Barrier::Thread Barrier::thread{};

void Barrier::arm() noexcept {
  if (!armed() && pthread_key_create(&ends, [](void*) { barrier().settle(); }) == 0) {
    armed_.store(true, std::memory_order_relaxed);
  } else if (!armed()) {
    pin();
  }
}

void Barrier::has_returned() noexcept {
  thread.jumped = false;
  inside_.fetch_sub(1);
}

// Sequentially consistent with close(): of a call that counts itself and a mover that closes, one sees the other.
bool Barrier::try_enter() noexcept {
  if (!armed()) return true;
  if (thread.depth == 0) {
    settle();
    inside_.fetch_add(1);
    if (word_.load() != kOpen) {
      inside_.fetch_sub(1);
      return false;
    }
  }
  ++thread.depth;
  return true;
}

bool Barrier::enter(bool stays) noexcept {
  while (!try_enter()) {
    if (!await()) return false;
  }
  if (!stays) return true;
  if (--thread.depth > 0) return true;
  thread.jumped = true;
  pthread_setspecific(ends, this);
  return true;
}

void Barrier::left() noexcept {
  if (--thread.depth == 0) inside_.fetch_sub(1);
}

void Barrier::wait_outside() noexcept {
  if (thread.depth != 0) return;
  settle();
  if (word_.load(std::memory_order_relaxed) != kOpen) [[unlikely]]
    await();
}

bool Barrier::await() noexcept {
  waiting_.fetch_add(1);
  const bool opened = awaited();
  waiting_.fetch_sub(1);
  return opened;
}

bool Barrier::awaited() noexcept {
  for (;;) {
    const std::uint32_t seen = word_.load();
    if (seen == kOpen) return true;
    if (seen == kEnded) return false;
    if (seen == kClosing && now_ns() - closing_ns_.load() >= kPatienceNs) {
      change(kClosing, kOpen);
      continue;
    }
    futex_sleep(word_, seen, kLookNs);
  }
}

bool Barrier::change(std::uint32_t from, std::uint32_t to) noexcept {
  const bool changed = word_.compare_exchange_strong(from, to);
  if (changed) futex_wake_all(word_);
  return changed;
}

bool Barrier::close(std::int64_t longest_ns) noexcept {
  settle();
  closing_ns_.store(now_ns());
  if (pinned() || !change(kOpen, kClosing)) return false;
  const std::int64_t until = now_ns() + longest_ns;
  while (inside_.load() != 0 && word_.load() == kClosing && now_ns() < until) sched_yield();
  if (inside_.load() == 0 && !pinned() && word_.load() == kClosing) return true;
  open();
  return false;
}

bool Barrier::shut() noexcept { return change(kClosing, kShut); }

void Barrier::open() noexcept {
  if (!change(kShut, kOpen)) change(kClosing, kOpen);
}

void Barrier::end() noexcept {
  pin();  // or a mover that is still at it closes it for ever
  if (!change(kShut, kEnded)) change(kClosing, kOpen);
}

void Barrier::reset_in_child() noexcept {
  thread = {};
  inside_.store(0);
  waiting_.store(0);
  word_.store(kOpen);
  pinned_.store(true);  // the driver does not work in a child
}

}  // namespace cudasched::driver
