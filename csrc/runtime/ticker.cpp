#include "runtime/ticker.hpp"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <limits>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/blocked_signals.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/futex.hpp"
#include "base/log.hpp"
#include "base/sleep.hpp"
#include "runtime/counts.hpp"
#include "runtime/engine.hpp"
#include "runtime/engine_policy.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/tracing.hpp"
#include "telemetry/cupti.hpp"

namespace cudasched::runtime {
namespace {

constexpr std::int64_t kActiveTickNs = kNsPerMs;     // while a latency client of this process is active
constexpr std::int64_t kBusyTickNs = 5 * kNsPerMs;   // while it launches
constexpr std::int64_t kIdleTickNs = 20 * kNsPerMs;  // else; a heartbeat must not grow stale
constexpr int kIdleTicks = 15;                       // so often; where nothing is scheduled, not once
constexpr std::int64_t kPublishNs = 10 * kNsPerMs;
constexpr std::int64_t kReapAllNs = 20 * kNsPerMs;
constexpr std::int64_t kPolicyHangsNs = kNsPerSecond;
constexpr std::int64_t kQuietTickNs = kNsPerSecond;  // then, while nothing begins: for the figures of `status`

}  // namespace

void Ticker::start() {
  if (running_.exchange(true)) return;
  try {
    const BlockedSignals blocked;
    std::thread([this] { run(); }).detach();
  } catch (const std::exception& error) {
    running_.store(false);
    throw Error(std::string("no thread can be started (") + error.what() +
                "): raise the limit of processes (ulimit -u), or the container's");
  }
}

void Ticker::run() noexcept {
  pthread_setname_np(pthread_self(), "cudasched");
  prctl(PR_SET_TIMERSLACK, 1UL);  // else contexts are prewarmed 50 us late
  std::uint64_t launches_before = 0;
  int idle_ticks = 0;
  while (hot().scheduling.load(std::memory_order_relaxed) && finish_.load() == kRuns) {
    const std::int64_t now = now_ns();
    const bool active = tick(now);
    const std::uint64_t launches = hot().counters.launches();
    const bool launching = launches != launches_before;
    launches_before = launches;
    bool schedules = false;
    std::int64_t ready = std::numeric_limits<std::int64_t>::max();  // when the first context is to be prewarmed
    engine().for_each_device([&](const Device& device) {
      const bool latency = device.registered(Class::kLatency);
      schedules = schedules || latency || device.registered(Class::kBestEffort);
      if (const std::int64_t at = latency ? device.latency.ready_ns() : 0; at > now) ready = std::min(ready, at);
    });
    idle_ticks = !schedules ? kIdleTicks : active || launching ? 0 : std::min(idle_ticks + 1, kIdleTicks);
    if (idle_ticks == kIdleTicks && !needs_ticks()) {
      publish_counts();
      hot().ticker.sleep_deeply(kQuietTickNs, [&] { return !needs_ticks() && finish_.load() == kRuns; });
      continue;
    }
    const std::int64_t longest = active ? kActiveTickNs : launching ? kBusyTickNs : kIdleTickNs;
    sleep_ns(std::clamp<std::int64_t>(ready - now_ns(), 1, longest));
  }
  if (finish_.load() == kAsked) engine().lifecycle().stop();
  finish_.store(kEnded);
  futex_wake_all(finish_);
}

void Ticker::finish(std::int64_t patience_ns) noexcept {
  std::uint32_t runs = kRuns;
  if (!running_.load() || !finish_.compare_exchange_strong(runs, kAsked)) return;
  hot().ticker.wake();
  const std::int64_t until = now_ns() + patience_ns;
  for (std::int64_t left = patience_ns; finish_.load() == kAsked && left > 0; left = until - now_ns()) {
    futex_sleep(finish_, kAsked, left);
  }
}

// Do other clients look for a sign of life of this process, now or at any moment?
bool Ticker::needs_ticks() noexcept {
  bool found = false;
  engine().for_each_device([&](Device& device) {
    found = found || (device.registered(Class::kLatency) && device.latency.expected(now_ns())) ||
            (device.registered(Class::kBestEffort) && (device.gate.waits() || device.holds_launches()));
  });
  return found || hot().marks.needs_sweep();
}

// False: the table cannot be used any more, and scheduling is off.
bool Ticker::tend(Device& device, std::int64_t now) noexcept {
  using arbiter::Condition;
  try {
    switch (device.tend(now)) {
      case Condition::kSound:
        break;
      case Condition::kRepaired:
        if (!std::exchange(said_repaired_, true)) {
          log::warning(device.table().why() +
                       "; cudasched has repaired the table and registered the clients anew. Let nothing "
                       "but cudasched write to the table");
        }
        break;
      case Condition::kMoved:
        if (!std::exchange(said_moved_, true)) {
          log::warning("the client table " + device.table().path() +
                       " was deleted or replaced; this program is registered anew in the one that is there now");
        }
        break;
      case Condition::kStranded:
        if (!std::exchange(said_stranded_, true)) {
          log::warning(device.table().why() + "; programs that start from now on and this one do not see each other");
        }
        break;
      case Condition::kLost:
        engine().lifecycle().fail(device.table().why_lost());
        return false;
    }
  } catch (const std::exception& error) {
    engine().lifecycle().fail(error.what());  // no memory for a message
    return false;
  }
  return true;
}

// Saves the predictors of best-effort clients, where the process has launched since the last save.
void Ticker::save_predictors(std::int64_t now) noexcept {
  const std::uint64_t launches = hot().counters.launches(Class::kBestEffort);
  if (launches == saved_launches_) return;
  saved_launches_ = launches;
  save_after_ns_ = std::min(2 * save_after_ns_, kMostSaveNs);
  save_ns_ = now + save_after_ns_;
  engine().for_each_device([&](Device& device) {
    if (!device.save_predictor()) save_ns_ = std::numeric_limits<std::int64_t>::max();  // said; at exit once more
  });
}

// Not at each tick: a record has some kilobytes.
void Ticker::publish_counts() noexcept {
  const std::unique_lock lock(publishing_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // at exit
  gather_counts(counts_);
  engine().for_each_device([&](Device& device) { device.publish(counts_); });
}

// A user's policy that does not return holds the gate's lock and cannot be cancelled: `cudasched status` names it.
void Ticker::watch_policy(Device& device, std::int64_t now) noexcept {
  const int slot = device.slot(Class::kBestEffort);
  const std::int64_t since = policy_asked_since_ns();
  const bool hangs = since != 0 && now - since > kPolicyHangsNs;
  device.table().slot(slot).policy_since_ns.store(hangs ? since : 0, std::memory_order_relaxed);
  if (hangs && !std::exchange(said_policy_hangs_, true)) {
    log::error("this program's policy has not answered for a second and cannot be cancelled; the launch waits");
  }
}

bool Ticker::tick(std::int64_t now) noexcept {
  const bool reaps_all = now - reaped_all_ns_ >= kReapAllNs;
  if (reaps_all) reaped_all_ns_ = now;
  const telemetry::Counters& counters = hot().counters;
  bool active = false;
  sweep_marks();
  engine().slices().tick();
  if (counters.total(&telemetry::Shard::contested_streams) > 0 && !std::exchange(said_contested_, true)) {
    log::warning(
        "latency and best-effort work are launched on one stream: latency work goes first, and threads outside of "
        "regions that launch there are not best effort; give each class a stream of its own");
  }
  engine().for_each_device([&](Device& device) {
    if (device.queue() != nullptr) device.queue()->check();
    if (!tend(device, now)) return;
    for (int i = 0; i < kClassCount; ++i) {
      const int index = device.slot(static_cast<Class>(i));
      if (index < 0) continue;
      arbiter::Slot& slot = device.table().slot(index);
      slot.heartbeat_ns.store(now, std::memory_order_relaxed);
      // Counts are the process's, shown with each of its clients; a process with several GPUs shows them with each.
      slot.launches.store(counters.launches(static_cast<Class>(i)), std::memory_order_relaxed);
      slot.device_launches.store(telemetry::cupti::device_launches(), std::memory_order_relaxed);
      if (static_cast<Class>(i) == Class::kBestEffort) {
        slot.gate_waits.store(counters.gate_waits.count(), std::memory_order_relaxed);
        slot.gate_wait_ns.store(counters.gate_waits.sum_ns(), std::memory_order_relaxed);
      }
    }
    if (device.registered(Class::kLatency)) {
      device.latency.tick(now);
      active = active || device.latency.imminent(now);
    }
    if (device.gate.registered()) device.peers.refresh(now);
    memory().refresh_pools(device.ordinal());
    memory().publish(device);
    device.gate.report_overdue(now);
    if (device.gate.registered()) {
      watch_policy(device, now);
      device.gate.write_again();
      if (const std::string_view why = device.gate.refused_policy();
          !why.empty() && !said_policy_refused_.exchange(true)) {
        std::array<char, 256> message{};
        std::snprintf(message.data(), message.size(),
                      "the policy was refused, and every launch goes at once from here on: %.*s",
                      static_cast<int>(why.size()), why.data());
        log::error(message.data());
      }
      // A client that was killed while idle holds nothing closed, but keeps the gate on. Bits that damage has set are
      // looked for less often: that asks for every client's lock.
      device.table().reap(reaps_all ? ~std::uint64_t{0} : device.table().latency_clients() | device.table().active());
    }
  });
  engine().slice_keeper().tick(engine(), now);
  decisions_.say(now);
  if (save_ns_ == 0) save_ns_ = now + kFirstSaveNs;
  if (save_ns_ <= now) save_predictors(now);
  engine().serve_control();  // in tables that were looked after
  memory().look_for_cache(now);
  memory().publish_pools(now);
  if (telemetry::tracing() && now - traced_ns_ >= kTraceCountersNs) {
    traced_ns_ = now;
    engine().for_each_device([](Device& device) { trace_counters(device); });
  }
  if (now - published_ns_ >= kPublishNs) {
    published_ns_ = now;
    publish_counts();
  }
  return active;
}

}  // namespace cudasched::runtime
