// The C boundary of a user's own policy.

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
  const auto* const policy = static_cast<const CPolicy*>(context);
  schedule::Decision decision;
  // An answer that does not exist is refused by the decider.
  decision.answer = static_cast<Answer>(policy->function(&snapshot, policy->context, &decision.wait_ns));
  return decision;
}

}  // namespace
}  // namespace cudasched::runtime

extern "C" int cudasched_use_policy(cudasched_policy policy, void* context) {
  using namespace cudasched;
  return runtime::guarded([&] {
    if (policy == nullptr) throw ConfigError("a policy of your own is a function; this one is null");
    runtime::engine().use_policy({&runtime::ask, new runtime::CPolicy{policy, context}});
  });
}
