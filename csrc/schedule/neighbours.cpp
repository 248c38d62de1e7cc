#include "schedule/neighbours.hpp"

#include <algorithm>
#include <span>

#include "base/clock.hpp"
#include "schedule/fair.hpp"
#include "schedule/quiet.hpp"
#include "schedule/slack.hpp"
#include "schedule/turn.hpp"

namespace cudasched::schedule {
namespace {

// The most that a damaged word may say, so that sums of words do not overflow: a month.
constexpr std::int64_t kPlausibleNs = (std::int64_t{1} << 52) - 1;

constexpr std::uint64_t bit(int slot) noexcept { return std::uint64_t{1} << slot; }

template <typename Visit>
void for_each_slot(std::uint64_t slots, Visit&& visit) {
  for (; slots != 0; slots &= slots - 1) visit(__builtin_ctzll(slots));
}

bool is_client(const arbiter::Slot& slot, Class client_class) noexcept {
  return slot.occupied.load(std::memory_order_relaxed) != 0 &&
         slot.client_class.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(client_class);
}

const arbiter::Slot& slot_of(const arbiter::Layout& table, int slot) noexcept {
  return table.slots[static_cast<std::size_t>(slot)];
}

std::uint64_t latency_clients(const arbiter::Layout& table) noexcept {
  return table.latency.load(std::memory_order_relaxed);
}

// Those that hold the gate closed. One that is stopped or swapped out does not count until it runs again.
std::uint64_t active_latency(const arbiter::Layout& table, std::int64_t stale_ns, std::int64_t now) noexcept {
  std::uint64_t found = 0;
  for_each_slot(table.active.load() & latency_clients(table), [&](int slot) {
    const arbiter::Slot& client = slot_of(table, slot);
    if (is_client(client, Class::kLatency) &&
        is_fresh(client.heartbeat_ns.load(std::memory_order_relaxed), now, stale_ns))
      found |= bit(slot);
  });
  return found;
}

// The least slack of the active requests of one GPU.
std::int64_t slack_ns(const arbiter::Layout& table, std::uint64_t active, std::int64_t admitted,
                      std::int64_t now) noexcept {
  // Further away than anything that a request may say: a foreign or damaged word.
  constexpr std::int64_t kMostNs = 2 * 3600 * kNsPerSecond;
  std::array<Request, arbiter::kSlotCount> requests;
  std::size_t count = 0;
  bool known = true;
  for_each_slot(active, [&](int slot) {
    const arbiter::Slot& client = slot_of(table, slot);
    const std::int64_t deadline = client.deadline_ns.load(std::memory_order_relaxed);
    const std::int64_t expected = client.expected_ns.load(std::memory_order_relaxed);
    const std::int64_t entered = client.entered_ns.load(std::memory_order_relaxed);
    const std::int64_t before = client.admitted_at_entry_ns.load(std::memory_order_relaxed);
    known = known && expected > 0 && expected <= kMostNs && deadline > now - kMostNs && deadline <= now + kMostNs &&
            entered > now - kMostNs && entered <= now && before <= admitted && before >= admitted - kMostNs;
    if (!known) return;
    requests[count++] = {deadline, remaining_ns(expected, now - entered - (admitted - before)), expected};
  });
  return known ? least_slack_ns(std::span(requests).first(count), now) : Snapshot::kUnknownNs;
}

}  // namespace

std::int64_t other_requests_slack_ns(const arbiter::Layout& table, int own_slot, std::int64_t stale_heartbeat_ns,
                                     std::int64_t now) noexcept {
  const std::uint64_t own = own_slot >= 0 ? bit(own_slot) : 0;
  const std::uint64_t active = active_latency(table, stale_heartbeat_ns, now) & ~own;
  return slack_ns(table, active, table.admitted_ns.load(std::memory_order_relaxed), now);
}

void Neighbours::join(arbiter::Layout* layout, int slot, bool mps, const GateSettings& settings) noexcept {
  layout_ = layout;
  slot_ = slot;
  mps_ = mps;
  stale_heartbeat_ns_ = settings.stale_heartbeat_ns;
  turn_ns_ = settings.turn_ns;
  gaps_ = GapView(settings.host_bound_inflation);
}

bool Neighbours::fresh(const arbiter::Slot& client, std::int64_t now) const noexcept {
  return is_fresh(client.heartbeat_ns.load(std::memory_order_relaxed), now, stale_heartbeat_ns_);
}

bool Neighbours::fresh(int slot, std::int64_t now) const noexcept { return fresh(slot_of(*layout_, slot), now); }

std::uint64_t Neighbours::other_best_effort() const noexcept {
  std::uint64_t found = 0;
  for_each_slot(layout_->best_effort.load(std::memory_order_relaxed) & ~bit(slot_), [&](int slot) {
    if (is_client(slot_of(*layout_, slot), Class::kBestEffort)) found |= bit(slot);
  });
  return found;
}

// The others that wait at the gate. One that was stopped or killed there is not waited for.
std::uint64_t Neighbours::waiting(std::int64_t now) const noexcept {
  std::uint64_t found = 0;
  for_each_slot(layout_->waiting.load(std::memory_order_relaxed) & other_best_effort(), [&](int other) {
    if (fresh(other, now)) found |= bit(other);
  });
  return found;
}

bool Neighbours::idle(int slot, std::int64_t now) const noexcept {
  return is_idle(slot_of(*layout_, slot).in_flight_until_ns.load(std::memory_order_relaxed), now);
}

bool Neighbours::latency_active(std::int64_t now) const noexcept {
  bool active = false;
  for_each_table(
      [&](const arbiter::Layout& table) { active = active || active_latency(table, stale_heartbeat_ns_, now) != 0; });
  return active;
}

bool Neighbours::look(Snapshot& snapshot, std::int64_t now, std::int64_t turn_waited_ns) noexcept {
  active_ = 0;
  std::int64_t slack = Snapshot::kLongAgoNs;
  const auto look_at = [&](const arbiter::Layout& table) {
    snapshot.latency_clients = snapshot.latency_clients || latency_clients(table) != 0;
    const std::uint64_t active = active_latency(table, stale_heartbeat_ns_, now);
    const std::int64_t admitted = table.admitted_ns.load(std::memory_order_relaxed);
    if (&table == layout_) {
      active_ = active;
      admitted_ns_ = admitted;
    }
    if (active == 0) return;
    snapshot.latency_active = true;
    slack = std::min(slack, slack_ns(table, active, admitted, now));  // an unknown one is the least
  };
  snapshot.latency_clients = false;
  for_each_table(look_at);
  if (snapshot.latency_active) snapshot.slack_ns = slack;
  if (looks_into_requests_) snapshot.host_bound.known = look_at_segments(now);
  const bool may_go =
      !snapshot.latency_active || snapshot.slack_ns != Snapshot::kUnknownNs || snapshot.host_bound.known;
  if (may_go) for_each_table([&](const arbiter::Layout& table) { look_ahead(table, snapshot, now); });

  // The client was stopped while it waited: no time of that while is owed to it.
  if (looked_ns_ != 0 && now - looked_ns_ > stale_heartbeat_ns_) rejoined(now);
  looked_ns_ = now;

  bool passed_on = false;
  const std::uint64_t others = other_best_effort();
  for_each_slot(others, [&](int other) {
    const arbiter::Slot& client = slot_of(*layout_, other);
    if (!measures(client, now)) return;
    snapshot.latency_clients = true;  // little may be in flight
    snapshot.hint_ns = std::max(snapshot.hint_ns, pause_ns(client, now));
  });
  if (others != 0 && mps_) {
    for_each_slot(others, [&](int other) {
      const std::int64_t until = slot_of(*layout_, other).in_flight_until_ns.load(std::memory_order_relaxed);
      snapshot.in_flight_ns += foreign_in_flight_ns(until, now);
    });
    FairView view;
    view.self = slot_;
    view.waiting = waiting(now);
    view.virtual_ns = virtual_times(view.waiting | bit(slot_), now);
    view.waited_ns = turn_waited_ns;
    snapshot.my_turn = may_feed(view);
  } else if (others != 0 && may_go) {
    snapshot.my_turn = my_turn(now, passed_on);
  }
  if (looks_into_requests_) look_into_gaps(snapshot);
  return passed_on;
}

// Reads latency clients' segments; are all segments under way known? Of one on another GPU of the job nothing is.
bool Neighbours::look_at_segments(std::int64_t now) noexcept {
  gaps_.begin(now);
  for_each_slot(latency_clients(*layout_) | active_, [&](int slot) {
    const arbiter::Slot& client = slot_of(*layout_, slot);
    Segments::SegmentNews told;
    told.late_ns = client.segment_late_ns.load(std::memory_order_acquire);
    told.segment = client.segment.load(std::memory_order_relaxed);
    told.since_ns = client.segment_since_ns.load(std::memory_order_relaxed);
    told.median_ns = client.segment_median_ns.load(std::memory_order_relaxed);
    told.left = client.segment_left.load(std::memory_order_relaxed);
    // done_ns is read before submitted_ns, and so is no larger.
    Progress progress;
    progress.done_ns = client.latency_done_ns.load(std::memory_order_acquire) & kPlausibleNs;
    progress.not_done_ns = client.latency_not_done_ns.load(std::memory_order_acquire) & kPlausibleNs;
    progress.submitted_ns = client.latency_gpu_ns.load(std::memory_order_relaxed) & kPlausibleNs;
    gaps_.add(slot, told, progress, (active_ & bit(slot)) != 0);
  });
  bool elsewhere = false;
  for_each_table([&](const arbiter::Layout& table) {
    elsewhere = elsewhere || (&table != layout_ && active_latency(table, stale_heartbeat_ns_, now) != 0);
  });
  return gaps_.known() && !elsewhere;
}

void Neighbours::look_into_gaps(Snapshot& snapshot) noexcept {
  const bool known = snapshot.host_bound.known;
  const std::uint64_t own = own_latency_ >= 0 ? bit(own_latency_) : 0;
  GapView::Own view;
  view.in_flight_ns = snapshot.in_flight_ns;
  view.longest_ns = snapshot.longest_ns();
  view.submitted_ns = admitted_gpu_ns_;
  view.submitted = admitted_launches_;
  view.in_flight = snapshot.launches_in_flight;
  snapshot.host_bound = gaps_.look(view, /*sliced=*/!mps_ && (active_ & ~own) != 0);
  snapshot.host_bound.known = known;
}

// Latency work that was announced, or is foreseen by the times at which it came.
void Neighbours::look_ahead(const arbiter::Layout& table, Snapshot& snapshot, std::int64_t now) const noexcept {
  // Further away than any of them may say: a foreign or damaged word.
  constexpr std::int64_t kMostNs = 60 * kNsPerSecond;
  const auto ahead = [&](const std::atomic<std::int64_t>& word) {
    const std::int64_t at_ns = word.load(std::memory_order_relaxed);
    return at_ns > now && at_ns <= now + kMostNs ? at_ns - now : 0;
  };
  for_each_slot(latency_clients(table), [&](int slot) {
    const arbiter::Slot& client = slot_of(table, slot);
    if (!is_client(client, Class::kLatency) || !fresh(client, now)) return;
    snapshot.hint_ns = std::max(snapshot.hint_ns, std::min(ahead(client.hint_until_ns), kNsPerSecond));
    if (const std::int64_t over = ahead(client.foreseen_over_ns); over > 0) {
      snapshot.free_ns = std::min(snapshot.free_ns, ahead(client.foreseen_ns));
      snapshot.foreseen_over_ns = std::max(snapshot.foreseen_over_ns, over);
    }
    if (const std::int64_t free = client.rate_free_ns.load(std::memory_order_relaxed); free > 0) {
      snapshot.free_ns = std::min(snapshot.free_ns, free);
      snapshot.foreseen_over_ns = std::max<std::int64_t>(snapshot.foreseen_over_ns, kNsPerMs);
    }
  });
}

const std::int64_t* Neighbours::virtual_times(std::uint64_t slots, std::int64_t now) noexcept {
  // All the time since the machine was started, at the lowest priority and weight; more is a damaged word.
  const std::int64_t most = charge_ns(now, -kLargestPriority, kLeastWeightMilli);
  for_each_slot(slots, [&](int slot) {
    const std::int64_t virtual_ns = slot_of(*layout_, slot).virtual_ns.load(std::memory_order_relaxed);
    virtual_ns_[static_cast<std::size_t>(slot)] = virtual_ns >= 0 && virtual_ns <= most ? virtual_ns : 0;
  });
  return virtual_ns_.data();
}

bool Neighbours::my_turn(std::int64_t now, bool& passed_on) noexcept {
  auto& layout = *layout_;
  TurnView view;
  view.word = layout.turn.load(std::memory_order_acquire);
  view.self = slot_;
  view.best_effort = other_best_effort() | bit(slot_);
  view.waiting = waiting(now);
  view.now_us = now / kNsPerUs;
  view.turn_us = turn_ns_ / kNsPerUs;
  const int owner = Turn::unpack(view.word).owner;
  const std::uint64_t owner_bit = owner >= 0 ? bit(owner) & view.best_effort : 0;
  if (owner_bit != 0) {
    view.owner_until_us = slot_of(*layout_, owner).in_flight_until_ns.load(std::memory_order_relaxed) / kNsPerUs;
  }
  view.virtual_ns = virtual_times((view.waiting & view.best_effort) | owner_bit | bit(slot_), now);
  view.offered = view.word != turn_word_;
  view.turn_used = 2 * turn_used_ns_ >= turn_ns_;
  const TurnDecision decision = take_turn(view);
  if (!decision.swap) return decision.mine;
  if (!layout.turn.compare_exchange_strong(view.word, decision.new_word, std::memory_order_acq_rel)) return false;
  if (decision.mine) {
    turn_word_ = decision.new_word;
    turn_used_ns_ = 0;
  }
  passed_on = !decision.mine;
  return decision.mine;
}

void Neighbours::rejoined(std::int64_t now) noexcept {
  const std::uint64_t others = other_best_effort();
  if (others == 0 || !idle(slot_, now)) return;
  std::uint64_t at_work = waiting(now);
  for_each_slot(others, [&](int other) {
    if (!idle(other, now)) at_work |= bit(other);
  });
  const JoinView view{slot_, others, at_work, virtual_times(others | bit(slot_), now)};
  own_virtual_ns_ = joined_ns(view);
  own_slot().virtual_ns.store(own_virtual_ns_, std::memory_order_relaxed);
}

void Neighbours::write_again() noexcept {
  arbiter::Slot& self = own_slot();
  if (self.virtual_ns.load(std::memory_order_relaxed) != own_virtual_ns_) self.virtual_ns.store(own_virtual_ns_);
  if (self.in_flight_until_ns.load(std::memory_order_relaxed) != own_in_flight_until_ns_) {
    self.in_flight_until_ns.store(own_in_flight_until_ns_);
  }
  if (self.collectives.load(std::memory_order_relaxed) != rendezvous_.word()) publish_collectives();
}

bool Neighbours::admitted(const Snapshot& seen, int own_latency_slot) noexcept {
  // Latency work of another GPU loses nothing to this one's.
  if (active_ != 0 && !take_from_slack(seen, own_latency_slot)) return false;
  arbiter::Slot& self = own_slot();
  const std::int32_t priority = self.priority.load(std::memory_order_relaxed);
  // By atomic addition, which wraps where a damaged word would overflow.
  const std::uint32_t weight_milli = self.weight_milli.load(std::memory_order_relaxed);
  const std::int64_t charge = charge_ns(seen.predicted_ns, priority, weight_milli);
  self.virtual_ns.fetch_add(charge, std::memory_order_relaxed);
  own_virtual_ns_ += charge;
  turn_used_ns_ += seen.predicted_ns;
  ++admitted_launches_;
  admitted_gpu_ns_ += seen.predicted_ns;
  return true;
}

// Where the slack is known, only as the last look saw it: another gate that admits from it at the same moment, under
// MPS, must not take the same time. Else, all that enters is noted.
bool Neighbours::take_from_slack(const Snapshot& seen, int own_latency_slot) noexcept {
  // Latency work of this process runs in the same context.
  const std::uint64_t own = own_latency_slot >= 0 ? bit(own_latency_slot) : 0;
  const bool switches = !mps_ && (active_ & ~own) != 0;
  const std::int64_t switch_ns = switches ? kContextSwitchNs : 0;
  const std::int64_t cost = admission_cost_ns(seen.longest_ns(), seen.in_flight_ns, switch_ns);
  auto& admitted = layout_->admitted_ns;
  if (seen.slack_ns == Snapshot::kUnknownNs) {
    admitted.fetch_add(cost, std::memory_order_relaxed);
    return true;
  }
  std::int64_t before = admitted_ns_;
  std::int64_t after = 0;
  // A damaged word may overflow: it then wraps, as by atomic addition.
  static_cast<void>(__builtin_add_overflow(before, cost, &after));
  return admitted.compare_exchange_strong(before, after, std::memory_order_relaxed);
}

void Neighbours::publish(std::int64_t in_flight_until_ns) noexcept {
  own_in_flight_until_ns_ = in_flight_until_ns;
  own_slot().in_flight_until_ns.store(in_flight_until_ns, std::memory_order_relaxed);
}

void Neighbours::publish_collectives() noexcept {
  own_slot().collectives.store(rendezvous_.word(), std::memory_order_release);
}

void Neighbours::collective_arrived(std::int64_t now) noexcept {
  rendezvous_.arrive(now);
  publish_collectives();
}

bool Neighbours::collective_submitted(std::int64_t now) noexcept {
  const bool missed = rendezvous_.submitted(now);
  publish_collectives();
  return missed;
}

void Neighbours::report_requests(Lead& lead) noexcept {
  for_each_slot(latency_clients(*layout_), [&](int slot) {
    const arbiter::Slot& client = slot_of(*layout_, slot);
    std::uint64_t& seen = requests_seen_[static_cast<std::size_t>(slot)];
    const std::uint64_t completed = client.requests.load(std::memory_order_acquire);
    if (completed == seen) return;
    seen = completed;
    lead.completed(client.request_ns.load(std::memory_order_relaxed),
                   client.request_waited_ns.load(std::memory_order_relaxed));
  });
}

}  // namespace cudasched::schedule
