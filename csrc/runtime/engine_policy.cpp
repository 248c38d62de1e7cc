// The C boundary of a user's own policy. A policy that takes long keeps the gate's lock from everyone else: it is
// timed. One that takes a millisecond and more is suspected, as a busy machine may have taken its core away; the next
// time that it does so of its own doing, by sleeping or by computing, it is refused.

#include "runtime/engine_policy.hpp"

#include <sys/resource.h>
#include <time.h>

#include <array>
#include <atomic>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "cudasched/engine.h"
#include "runtime/engine.hpp"
#include "runtime/guarded.hpp"

namespace cudasched::runtime {
namespace {

using schedule::Answer;

static_assert(CUDASCHED_SUBMIT == static_cast<int>(Answer::kSubmit) &&
              CUDASCHED_WAIT_FOR_TIME == static_cast<int>(Answer::kWaitForTime) &&
              CUDASCHED_WAIT_FOR_LATENCY == static_cast<int>(Answer::kWaitForLatency) &&
              CUDASCHED_WAIT_FOR_TURN == static_cast<int>(Answer::kWaitForTurn));

// A policy in C and its context; never freed, as a gate may be asking it.
struct CPolicy {
  cudasched_policy function;
  void* context;
  std::atomic<bool> suspected{false};
};

// When each policy that is being asked now was asked, 0: none. Each gate asks one at a time, and there is one a device.
constinit std::array<std::atomic<std::int64_t>, Engine::kMaxDevices> asked_ns{};

class Asking {
 public:
  Asking() noexcept : since_ns_(now_ns()) {
    for (auto& place : asked_ns) {
      std::int64_t free = 0;
      if (!place.compare_exchange_strong(free, since_ns_, std::memory_order_relaxed)) continue;
      place_ = &place;
      return;
    }
  }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;
  ~Asking() {
    if (place_ != nullptr) place_->store(0, std::memory_order_relaxed);
  }
  std::int64_t since_ns() const noexcept { return since_ns_; }

 private:
  std::int64_t since_ns_;
  std::atomic<std::int64_t>* place_ = nullptr;
};

// The calling thread's own computing and sleeping.
struct Doings {
  std::int64_t computed_ns = 0;
  long slept = 0;

  static Doings now() noexcept {
    timespec computed{};
    rusage usage{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &computed);
    getrusage(RUSAGE_THREAD, &usage);
    return {computed.tv_sec * kNsPerSecond + computed.tv_nsec, usage.ru_nvcsw};
  }
};

schedule::Decision ask(const schedule::Snapshot& seen, void* context) noexcept {
  cudasched_snapshot snapshot{};
  snapshot.latency_clients = seen.latency_clients ? 1 : 0;
  snapshot.latency_active = seen.latency_active ? 1 : 0;
  snapshot.my_turn = seen.my_turn ? 1 : 0;
  snapshot.since_latency_ns = seen.since_latency_ns;
  snapshot.linger_ns = seen.linger_ns;
  snapshot.in_flight_ns = seen.in_flight_ns;
  snapshot.predicted_ns = seen.predicted_ns;
  snapshot.bound_ns = seen.bound_ns;
  snapshot.lead_ns = seen.lead_ns;
  snapshot.slack_ns = seen.slack_ns;
  snapshot.margin_ns = seen.margin_ns;
  snapshot.hint_ns = seen.hint_ns;
  snapshot.free_ns = seen.free_ns;
  snapshot.foreseen_over_ns = seen.foreseen_over_ns;
  snapshot.long_ns = seen.long_ns;
  snapshot.waited_ns = seen.waited_ns;
  snapshot.max_hold_ns = seen.max_hold_ns;
  auto* const policy = static_cast<CPolicy*>(context);
  const bool suspected = policy->suspected.load(std::memory_order_relaxed);
  const Doings before = suspected ? Doings::now() : Doings{};
  const Asking asking;
  schedule::Decision decision;
  // An answer that does not exist is refused by the decider.
  decision.answer = static_cast<Answer>(policy->function(&snapshot, policy->context, &decision.wait_ns));
  const std::int64_t took_ns = now_ns() - asking.since_ns();
  if (took_ns <= schedule::kLongestAnswerNs) return decision;
  if (!suspected) {
    policy->suspected.store(true, std::memory_order_relaxed);
    return decision;
  }
  const Doings after = Doings::now();
  if (after.slept != before.slept || after.computed_ns - before.computed_ns > schedule::kLongestAnswerNs) {
    decision.took_ns = took_ns;
  }
  return decision;
}

}  // namespace

std::int64_t policy_asked_since_ns() noexcept {
  std::int64_t first = 0;
  for (const auto& place : asked_ns) {
    const std::int64_t since = place.load(std::memory_order_relaxed);
    if (since != 0 && (first == 0 || since < first)) first = since;
  }
  return first;
}

}  // namespace cudasched::runtime

extern "C" int cudasched_use_policy(cudasched_policy policy, void* context) {
  using namespace cudasched;
  return runtime::guarded([&] {
    if (policy == nullptr) throw ConfigError("a policy of your own is a function; this one is null");
    runtime::engine().use_policy({&runtime::ask, new runtime::CPolicy{policy, context}});
  });
}
