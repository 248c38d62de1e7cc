#include "schedule/policy.hpp"

#include <algorithm>
#include <array>

namespace cudasched::schedule {
namespace {

constexpr std::array kPolicies{
    Policy{"strict", &strict, "nothing while latency work is active or announced, else just in time"},
    Policy{"slack", &slack, "as strict, but launches that fit the slack of the active requests go"},
    Policy{"harvest", &harvest, "as strict, but launches go where a request keeps the host busy and the GPU idle"},
    Policy{"open", &open, "everything at once: no gate"},
};

}  // namespace

std::span<const Policy> policies() noexcept { return kPolicies; }

const Policy* find_policy(std::string_view name) noexcept {
  const auto* const found =
      std::find_if(kPolicies.begin(), kPolicies.end(), [&](const Policy& policy) { return policy.name == name; });
  return found != kPolicies.end() ? found : nullptr;
}

std::string_view why_refused(const Snapshot& snapshot, const Decision& decision) noexcept {
  if (decision.took_ns > kLongestAnswerNs) return "it sleeps or computes for over a millisecond before it answers";
  switch (decision.answer) {
    case Answer::kSubmit:
      return decision.wait_ns == 0 ? "" : "it submits with a time to wait";
    case Answer::kWaitForTime:
      if (decision.wait_ns <= 0) return "it waits for a time that is not above 0";
      if (decision.wait_ns > kLongestWaitNs) return "it waits for more than a second";
      break;
    case Answer::kWaitForLatency:
      if (!snapshot.latency_active) return "it waits for latency work where none is active";
      if (decision.wait_ns != 0) return "it waits for latency work with a time to wait";
      break;
    case Answer::kWaitForTurn:
      if (snapshot.my_turn) return "it waits for a turn that it has";
      if (decision.wait_ns != 0) return "it waits for its turn with a time to wait";
      break;
    default:
      return "its answer does not exist";
  }
  if (!snapshot.latency_active && snapshot.waited_ns > kLongestWaitNs) return "it held a launch for over a second";
  return "";
}

Decider::Decider(UserPolicy user) noexcept : user_(user) {
  if (user_.decide == nullptr) refused_ = "it has no function";
}

Decision Decider::operator()(const Snapshot& snapshot) noexcept {
  if (policy_ != nullptr) return policy_->decide(snapshot);
  if (!refused_.empty()) return {};
  const Decision decision = user_.decide(snapshot, user_.context);
  refused_ = why_refused(snapshot, decision);
  return refused_.empty() ? decision : Decision{};
}

}  // namespace cudasched::schedule
