// Which policy decides, by name, and the interface of a user's own.
//
// A user's policy is a function from a Snapshot to a Decision, and a pointer that each call passes:
//
//   Decision politely(const Snapshot& snapshot, void*) noexcept {
//     if (snapshot.latency_active) return {Answer::kWaitForLatency, 0};
//     if (snapshot.in_flight_ns > 0) return {Answer::kWaitForTime, snapshot.in_flight_ns};
//     return {Answer::kSubmit, 0};
//   }
//   Decider decider(UserPolicy{&politely, nullptr});
//
// The gate calls the function at each look of a waiting launch, under the gate's lock. The function must not block,
// allocate, throw or call CUDA, and takes a fraction of a microsecond. why_refused() checks each answer. A policy with
// a wrong answer is refused: from then on every launch goes at once, and refused() tells why. Captures, the GIL and
// dead clients (docs/order.md) are never the policy's to decide.
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

// Why the decision is no answer to the snapshot; empty: it is one. Refused are: an unknown answer; a wait that is not
// positive or longer than a second; a time to wait with an answer other than kWaitForTime; a wait for latency work or a
// turn that is not there. So are a launch held for over a second without active latency work, and an answer that took
// longer than kLongestAnswerNs.
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
