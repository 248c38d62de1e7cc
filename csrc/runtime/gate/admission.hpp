// May a launch go now? Gathers what a policy may see into a snapshot (this client's own state, and by Neighbours what
// the arbiter tells of others), asks the policy, and sees to the limits that hold whatever a policy says.
//
// Not thread-safe but for latency_active(): the gate's lock is held.
#pragma once

#include <cstdint>
#include <string_view>

#include "arbiter/table.hpp"
#include "predict/predictor.hpp"
#include "runtime/neighbours.hpp"
#include "runtime/settings.hpp"
#include "schedule/hold_limit.hpp"
#include "schedule/lead.hpp"
#include "schedule/ledger.hpp"
#include "schedule/policy.hpp"

namespace cudasched::runtime {

// What the gate remembers of a launch between two looks.
struct Held {
  // What a look saw lasts until the next one.
  void note(const schedule::Snapshot& seen, const schedule::Decision& decision, std::int64_t now_ns) noexcept;
  // To be called before the next look.
  void pass(std::int64_t now_ns) noexcept;

  std::int64_t looked_ns = 0;  // 0: not yet
  bool active = false;         // what the last look saw: latency work,
  bool for_turn = false;       // and what the launch was held for
  bool for_lead = false;
  std::int64_t calm_ns = 0;   // waited in all: while no latency work was active,
  std::int64_t turn_ns = 0;   // for the turn,
  std::int64_t lead_ns = 0;   // and because the lead was in flight
  bool only_for_lead = true;  // nothing else has held it
};

class Admission {
 public:
  void join(arbiter::Table* table, int slot, bool mps, const Settings& settings) noexcept;
  void configure(const Settings& settings) noexcept;
  void use_policy(const schedule::Decider& policy) noexcept {
    decider_ = policy;
    neighbours_.look_into_requests(schedule::looks_into_requests(policy.name()));
  }
  std::string_view refused_policy() const noexcept { return decider_.refused(); }

  // The policy's answer. `stream`: the launch's.
  schedule::Decision decide(const schedule::Ledger& ledger, std::uint64_t stream, const predict::Prediction& prediction,
                            const Held& held, std::int64_t now_ns) noexcept;
  // What it was shown.
  const schedule::Snapshot& seen() const noexcept { return seen_; }

  // While no latency client is on the device: what is in flight is bounded, and nothing else holds a launch.
  schedule::Decision decide_ungated(const schedule::Ledger& ledger, std::uint64_t stream,
                                    std::int64_t predicted_ns) noexcept;

  // The launch is held because of what is in flight: is it to go nonetheless? `others_queued()`: are operations of
  // other streams queued behind it?
  template <typename OthersQueued>
  schedule::Exception exception(const schedule::Ledger& ledger, std::uint64_t stream, bool first_look,
                                OthersQueued&& others_queued) noexcept {
    const std::int64_t observed_ns = ledger.observed_ns();
    if (first_look) hold_limit_.begin(observed_ns);
    schedule::HoldLimit::View view{observed_ns, ledger.completions(), ledger.any_late(), ledger.late_ns(stream) > 0,
                                   false};
    view.others_queued = view.own_stream_is_late && others_queued();
    return hold_limit_.look(view);
  }

  // The launch that decide() let go is to be submitted; false: another client's gate took the slack that was seen.
  bool admitted(int own_latency_slot) noexcept { return neighbours_.admitted(seen_, own_latency_slot); }

  // Whose the GPU has been since the last decision.
  schedule::Ledger::Gpu gpu() const noexcept {
    using Gpu = schedule::Ledger::Gpu;
    const bool in_gaps = latency_was_active_ && seen_.host_bound.known && !seen_.host_bound.closed;
    if (!had_turn_ || (latency_was_active_ && seen_.slack_ns <= 0 && !in_gaps)) return Gpu::kAnothers;
    return in_gaps ? Gpu::kInGaps : latency_was_active_ ? Gpu::kShared : Gpu::kOwn;
  }
  // Latency work was active since then.
  bool latency_seen_since(std::int64_t time_ns) const noexcept { return latency_seen_ns_ >= time_ns; }

  schedule::Lead& lead() noexcept { return lead_; }
  std::int64_t long_ns() const noexcept { return long_ns_; }
  bool lead_adapts() const noexcept { return lead_adapts_; }
  Neighbours& neighbours() noexcept { return neighbours_; }
  const Neighbours& neighbours() const noexcept { return neighbours_; }

 private:
  Neighbours neighbours_;
  schedule::Decider decider_;
  schedule::Lead lead_;
  schedule::HoldLimit hold_limit_;
  schedule::Snapshot seen_;
  bool lead_adapts_ = false;
  std::int64_t margin_ns_ = 0;
  std::int64_t long_ns_ = 0;
  std::int64_t linger_ns_ = 0;
  bool latency_was_active_ = false;
  bool had_turn_ = true;
  std::int64_t latency_seen_ns_ = 0;  // when it last was; 0: never
};

}  // namespace cudasched::runtime
