#include "schedule/requests.hpp"

#include <algorithm>

#include "base/clock.hpp"
#include "schedule/admission.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kLongestSloNs = 3600 * kNsPerSecond;  // a longer one is a damaged word

// By compare-and-swap: the client's own writes meanwhile stand.
void restore(std::atomic<std::int64_t>& word, const std::atomic<std::int64_t>& own) noexcept {
  std::int64_t seen = word.load(std::memory_order_acquire);
  const std::int64_t right = own.load(std::memory_order_acquire);
  if (seen != right) word.compare_exchange_strong(seen, right);
}

}  // namespace

// `segment_late_ns` last: until then nothing is let in.
void publish(const Segments::SegmentNews& told, std::int64_t position_ns, arbiter::Slot& slot) noexcept {
  slot.segment_late_ns.store(0, std::memory_order_release);
  slot.latency_done_ns.store(position_ns, std::memory_order_relaxed);
  slot.latency_not_done_ns.store(position_ns, std::memory_order_relaxed);
  slot.segment_since_ns.store(told.since_ns, std::memory_order_relaxed);
  slot.segment_median_ns.store(told.median_ns, std::memory_order_relaxed);
  slot.segment_left.store(told.left, std::memory_order_relaxed);
  slot.segment.store(told.segment, std::memory_order_relaxed);
  slot.segment_late_ns.store(told.late_ns, std::memory_order_release);
}

void Requests::write_again(bool in_region) noexcept {
  arbiter::Slot& self = slot();
  restore(self.entered_ns, entered_ns_);
  restore(self.expected_ns, expected_ns_);
  restore(self.admitted_at_entry_ns, admitted_at_entry_ns_);
  restore(self.hint_until_ns, hint_until_ns_);
  if (!in_region) restore(self.deadline_ns, deadline_ns_);
}

void Requests::join(arbiter::Layout* layout, int slot, double miss_probability) noexcept {
  layout_ = layout;
  slot_.store(slot);
  arrivals_ = Arrivals(miss_probability);
}

int Requests::find_history(std::int64_t slo_ns) const noexcept {
  if (slo_ns <= 0) return kNone;
  const auto known = std::find_if(histories_.begin(), histories_.end(), [&](const History& history) {
    return history.slo_ns.load(std::memory_order_relaxed) == slo_ns;
  });
  return known != histories_.end() ? static_cast<int>(known - histories_.begin()) : kNone;
}

// Makes room for a target that is not known yet.
int Requests::history_of(std::int64_t slo_ns) noexcept {
  if (const int known = find_history(slo_ns); known != kNone || slo_ns <= 0) return known;
  const int chosen = replaced_;
  replaced_ = (replaced_ + 1) % kHistories;
  History& history = histories_[static_cast<std::size_t>(chosen)];
  history.expected_ns.store(0, std::memory_order_relaxed);
  history.slo_ns.store(slo_ns, std::memory_order_relaxed);
  history.times = {};
  return chosen;
}

void Requests::enter(std::int64_t slo_ns, bool alone) noexcept {
  region_history_.store(alone ? history_of(slo_ns) : kNone, std::memory_order_relaxed);
  if (alone) return;
  // Two requests at once: the time of either cannot be told.
  current_.store(kNone, std::memory_order_relaxed);
  expected_ns_.store(0);
  slot().expected_ns.store(0, std::memory_order_relaxed);
}

std::int64_t Requests::begin(std::int64_t now, bool in_region) noexcept {
  arbiter::Layout& layout = *layout_;
  arbiter::Slot& self = slot();
  int history = region_history_.exchange(kNone, std::memory_order_relaxed);
  if (!in_region) {
    const std::int64_t slo = self.slo_ns.load(std::memory_order_relaxed);
    history = find_history(slo);
    if (slo > 0 && slo <= kLongestSloNs) {
      deadline_ns_.store(now + slo);
      self.deadline_ns.store(now + slo, std::memory_order_relaxed);
    }
  }
  const std::int64_t expected =
      history == kNone ? 0 : histories_[static_cast<std::size_t>(history)].expected_ns.load(std::memory_order_relaxed);
  const std::uint64_t best_effort = layout.best_effort.load(std::memory_order_relaxed);
  std::int64_t waited = 0;
  for (std::uint64_t rest = best_effort; rest != 0; rest &= rest - 1) {
    const arbiter::Slot& other = layout.slots[static_cast<std::size_t>(__builtin_ctzll(rest))];
    waited = std::max(waited, foreign_in_flight_ns(other.in_flight_until_ns.load(std::memory_order_relaxed), now));
  }
  waited_ns_.store(waited, std::memory_order_relaxed);
  current_.store(history, std::memory_order_relaxed);
  const std::int64_t admitted = layout.admitted_ns.load(std::memory_order_relaxed);
  admitted_at_entry_ns_.store(admitted, std::memory_order_relaxed);
  expected_ns_.store(expected, std::memory_order_relaxed);
  hint_until_ns_.store(0, std::memory_order_relaxed);
  entered_ns_.store(now);
  self.admitted_at_entry_ns.store(admitted, std::memory_order_relaxed);
  self.expected_ns.store(expected, std::memory_order_relaxed);
  self.hint_until_ns.store(0, std::memory_order_relaxed);
  self.entered_ns.store(now, std::memory_order_release);
  return best_effort != 0 ? waited : -1;
}

void Requests::end(std::int64_t now, bool in_region) noexcept {
  arbiter::Slot& self = slot();
  const std::int64_t began = entered_ns_.load(std::memory_order_acquire);
  const std::int64_t took = now - began;
  const int history = current_.exchange(kNone, std::memory_order_relaxed);
  expected_ns_.store(0);
  self.expected_ns.store(0, std::memory_order_relaxed);
  if (!in_region) {
    deadline_ns_.store(0);
    self.deadline_ns.store(0, std::memory_order_relaxed);
  }
  if (took <= 0) return;
  arrivals_.arrived(began);
  look_ahead(now);
  if (in_region) return;
  if (history != kNone) {
    History& learned = histories_[static_cast<std::size_t>(history)];
    // A damaged word may be anything.
    std::int64_t admitted = 0;
    const bool damaged = __builtin_sub_overflow(layout_->admitted_ns.load(std::memory_order_relaxed),
                                                admitted_at_entry_ns_.load(std::memory_order_relaxed), &admitted) ||
                         admitted < 0;
    learned.times.observe(took, damaged ? took : admitted);
    const std::int64_t expected = learned.times.expected_ns();
    learned.expected_ns.store(expected == Snapshot::kUnknownNs ? 0 : expected, std::memory_order_relaxed);
    self.request_ns.store(took, std::memory_order_relaxed);
    self.request_waited_ns.store(waited_ns_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    self.requests.fetch_add(1, std::memory_order_release);
  }
  // A client's own target without regions has its history from its first request on.
  history_of(self.slo_ns.load(std::memory_order_relaxed));
}

void Requests::look_ahead(std::int64_t now) noexcept {
  const Arrivals::Foresight foresight = arrivals_.look(now);
  const bool any = foresight.over_ns > 0;
  const bool by_period = any && arrivals_.confidence() > 0;
  arbiter::Slot& self = slot();
  self.foreseen_ns.store(by_period ? now + foresight.free_ns : 0, std::memory_order_relaxed);
  self.foreseen_over_ns.store(by_period ? now + foresight.over_ns : 0, std::memory_order_relaxed);
  self.rate_free_ns.store(any && !by_period ? foresight.free_ns : 0, std::memory_order_relaxed);
  ready_ns_.store(by_period && foresight.ready_ns > 0 ? now + foresight.ready_ns : 0, std::memory_order_relaxed);
}

bool Requests::get_ready(std::int64_t now) noexcept {
  const std::int64_t ready = ready_ns();
  if (ready == 0 || now < ready) return false;
  ready_ns_.store(0, std::memory_order_relaxed);
  const std::int64_t over = slot().foreseen_over_ns.load(std::memory_order_relaxed);
  if (over <= now) return false;
  expect(over - now, now);
  return true;
}

void Requests::expect(std::int64_t within_ns, std::int64_t now) noexcept {
  // Not by arrivals_: work that began meanwhile has ended earlier hints, but in the slot alone.
  const std::int64_t said = now + std::min(within_ns, Arrivals::kLongestHintNs);
  const std::int64_t until = std::max(hint_until_ns_.load(std::memory_order_relaxed), said);
  hint_until_ns_.store(until);
  slot().hint_until_ns.store(until, std::memory_order_relaxed);
}

}  // namespace cudasched::schedule
