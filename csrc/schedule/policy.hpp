// Which policy decides, by name, and the interface of a user's own.
//
// A policy of one's own is a function from a Snapshot to a Decision, and a pointer that it is given back:
//
//   Decision politely(const Snapshot& snapshot, void*) noexcept {
//     if (snapshot.latency_active) return {Answer::kWaitForLatency, 0};
//     if (snapshot.in_flight_ns > 0) return {Answer::kWaitForTime, snapshot.in_flight_ns};
//     return {Answer::kSubmit, 0};
//   }
//   Decider decider(UserPolicy{&politely, nullptr});
//
// It is called at each look of a waiting launch, under the gate's lock: it must not block, allocate, throw or call
// CUDA, and takes a fraction of a microsecond. What it may say is checked (why_refused); a policy that says anything
// else is refused: from then on every launch is submitted at once, and refused() tells why. What is never the policy's
// to decide (capture, the GIL, dead clients: docs/order.md) is not asked of it.
//
// Pure. Decider is not thread-safe: the caller holds a lock.
#pragma once

#include <span>
#include <string_view>

#include "schedule/admission.hpp"

namespace cudasched::schedule {

struct Policy {
  std::string_view name;
  Decision (*decide)(const Snapshot&) noexcept;
  std::string_view summary;
};

// All that can be configured; the first is the default.
std::span<const Policy> policies() noexcept;

// Does it look into requests by the segments that latency clients learn (segments.hpp)?
constexpr bool looks_into_requests(std::string_view policy) noexcept {
  return policy == "harvest" || policy == "slack";
}

// Null if there is none of that name.
const Policy* find_policy(std::string_view name) noexcept;

struct UserPolicy {
  Decision (*decide)(const Snapshot& snapshot, void* context) noexcept = nullptr;
  void* context = nullptr;
};

inline constexpr std::int64_t kLongestWaitNs = 1'000'000'000;
inline constexpr std::int64_t kLongestAnswerNs = 1'000'000;

// Why this is no answer to that: an answer that does not exist, a wait that is not positive or longer than a second, a
// wait for something that is not there, a launch held for over a second while no latency work was active, or an answer
// that took longer than kLongestAnswerNs. Empty: it is one.
std::string_view why_refused(const Snapshot& snapshot, const Decision& decision) noexcept;

class Decider {
 public:
  explicit Decider(const Policy& policy = policies().front()) noexcept : policy_(&policy) {}
  // A null function is refused at once.
  explicit Decider(UserPolicy user) noexcept;

  Decision operator()(const Snapshot& snapshot) noexcept;

  // Why the policy is off; empty: it is not.
  std::string_view refused() const noexcept { return refused_; }
  std::string_view name() const noexcept { return policy_ != nullptr ? policy_->name : "user"; }

 private:
  const Policy* policy_ = nullptr;  // null: the user's
  UserPolicy user_;
  std::string_view refused_;
};

}  // namespace cudasched::schedule
