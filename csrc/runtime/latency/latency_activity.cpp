#include "runtime/latency/latency_activity.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <span>

#include "base/clock.hpp"
#include "base/sleep.hpp"
#include "driver/driver.hpp"
#include "runtime/gate.hpp"
#include "runtime/hot.hpp"
#include "schedule/deadline.hpp"
#include "schedule/neighbours.hpp"

namespace cudasched::runtime {
namespace {

std::int64_t earliest(const std::array<std::int64_t, 64>& deadlines) noexcept {
  std::int64_t first = 0;
  for (const std::int64_t deadline : deadlines) {
    if (deadline != 0 && (first == 0 || deadline < first)) first = deadline;
  }
  return first;
}

// By name, as far as these are told apart, and target.
std::uint64_t key_of(const Region& region) noexcept {
  return static_cast<std::uint64_t>(region.slo_ns) ^ static_cast<std::uint64_t>(region.counted + 1) << 56;
}

void count_region(const Region& region, std::int64_t end_ns) noexcept {
  hot().counters.regions.add(region.counted, region.slo_ns, end_ns - region.entered_ns, end_ns <= region.deadline_ns);
}

}  // namespace

void LatencyActivity::register_client(arbiter::Table* table, int slot, const Settings& settings, bool mps) noexcept {
  table_ = table;
  mps_ = mps;
  max_idle_hold_ns_ = settings.max_idle_hold_ns;
  stale_heartbeat_ns_ = settings.stale_heartbeat_ns;
  priority_ = settings.priority;
  by_deadline_ = settings.earliest_deadline_first;
  requests_.join(&table->layout(), slot, settings.miss_probability);
  segments_.join(table, slot, settings);
  any_registered_.store(true);
  slot_.store(slot, std::memory_order_release);
}

void LatencyActivity::moved(int slot) noexcept {
  slot_.store(slot, std::memory_order_release);
  requests_.moved(slot);
  segments_.moved(slot);
  publish();
}

// Restores the arbiter's words on this client in a damaged table.
void LatencyActivity::write_again() noexcept {
  if ((table_->active() >> slot() & 1) != (active_.load() ? 1U : 0U)) publish();
  const std::scoped_lock lock(probe_);
  const bool in_region = regions_.load(std::memory_order_relaxed) != 0;
  if (in_region) {
    publish_regions();
  } else {
    table_->slot(slot()).regions.store(0, std::memory_order_relaxed);
  }
  requests_.write_again(in_region);
}

void LatencyActivity::activate() noexcept {
  if (active_.exchange(true)) return;
  const std::int64_t now = now_ns();
  const bool in_region = regions_.load(std::memory_order_acquire) != 0;
  if (const std::int64_t waits = requests_.begin(now, in_region); waits >= 0) hot().counters.preemptions.add(waits);
  if (segments_.on()) {
    const std::uint64_t key =
        in_region ? region_key_.load(std::memory_order_relaxed)
                  : static_cast<std::uint64_t>(table_->slot(slot()).slo_ns.load(std::memory_order_relaxed));
    schedule::Segments::Target target;
    target.deadline_ns = in_region ? region_deadline_ns_.load(std::memory_order_relaxed) : requests_.deadline_ns();
    if (const std::int64_t expected = requests_.expected_ns(); expected > 0) target.expected_ns = expected;
    target.alone = table_->layout().best_effort.load(std::memory_order_relaxed) == 0;
    segments_.begin(key, now, gpu_is_anothers(), target);
  }
  publish();
}

bool LatencyActivity::expected(std::int64_t now) const noexcept {
  const arbiter::Slot& self = table_->slot(slot());
  return active_.load() || regions_.load() != 0 || self.hint_until_ns.load() > now ||
         self.foreseen_over_ns.load() > now || self.rate_free_ns.load() > 0 ||
         launches_.load() != launches_when_idle_.load();
}

// Copies active_ to the arbiter. A thread that changed active_ calls this function; two such threads may write in
// either order, so each looks again after its write.
void LatencyActivity::publish() noexcept {
  bool active = false;
  do {
    active = active_.load();
    if (active) {
      const std::int64_t now = now_ns();
      active_since_ns_.store(now, std::memory_order_relaxed);
      table_->set_active(slot(), now);
    } else {
      table_->clear_active(slot());
    }
  } while (active_.load() != active);
}

void LatencyActivity::deactivate(std::uint64_t launches_seen, bool forget_streams, bool hangs) noexcept {
  const auto under_way = [&] { return !hangs && launching(); };
  if (launches_.load() != launches_seen || under_way()) return;
  launches_when_idle_.store(launches_seen, std::memory_order_relaxed);
  if (forget_streams) {
    if (CUcontext const context = streams_.context(); context != nullptr) prewarmer_.worked_in(context);
    streams_.clear();
  }
  const std::int64_t now = now_ns();  // before the next activity can begin
  const bool was_active = active_.exchange(false);
  // A launch counted since the check above may have found the client active still, and its stream may have been
  // forgotten. One counted later finds it inactive, and the epoch changed.
  if (launches_.load() != launches_seen) {
    streams_.lose_count();
    active_.store(true);
  } else if (!was_active) {
    return;  // a launch that begins now finds it inactive, too
  } else if (under_way()) {
    // It may have found the client active still, and will note its stream anew.
    active_.store(true);
  } else {
    const bool in_region = regions_.load(std::memory_order_acquire) != 0;
    requests_.end(now, in_region);
    if (segments_.on()) segments_.end(now, driver::shareable_context());
    count_activity(now, in_region);
  }
  publish();
}

// An activity has ended: without a region it counts as a request.
void LatencyActivity::count_activity(std::int64_t now, bool in_region) noexcept {
  const std::int64_t took = now - requests_.began_ns();
  telemetry::Counters& counters = hot().counters;
  if (took > 0) {
    counters.latency_active_ns.fetch_add(static_cast<std::uint64_t>(took), std::memory_order_relaxed);
    if (!had_region_) {
      const std::int64_t slo = table_->slot(slot()).slo_ns.load(std::memory_order_relaxed);
      counters.regions.add(0, slo, took, took <= slo);
    }
  }
  had_region_ = in_region;
  count_pending(now);
}

void LatencyActivity::count_pending(std::int64_t now) noexcept {
  for (; pending_count_ > 0; --pending_count_) count_region(pending_[pending_count_ - 1], now);
}

schedule::ActivityView LatencyActivity::view(bool by_ticker, std::int64_t now) const noexcept {
  schedule::ActivityView seen;
  seen.by_ticker = by_ticker;
  seen.in_region = regions_.load(std::memory_order_acquire) != 0;
  seen.now_ns = now;
  seen.last_launch_ns = last_launch_ns_;
  seen.launching_since_ns = launching_since_ns_;
  seen.ends_itself = ends_itself_;
  seen.max_idle_hold_ns = max_idle_hold_ns_;
  if (by_ticker) {
    seen.active_since_ns = active_since_at_tick_;
    seen.launched_since_last_tick = launched_since_last_tick_;
  }
  return seen;
}

void LatencyActivity::settle(bool by_ticker, std::int64_t now) noexcept {
  const std::scoped_lock lock(probe_);
  // At exit, nothing calls the driver from here once stop() has passed probe_.
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  const std::uint64_t launches_seen = launches_.load();
  const schedule::ActivityView seen = view(by_ticker, now);
  if (!schedule::may_have_ended(seen) || !schedule::has_ended(seen, streams_.work(by_ticker))) return;
  deactivate(launches_seen, /*forget_streams=*/!seen.in_region, schedule::launch_hangs(seen));
  if (!active_.load()) ends_itself_ = !by_ticker;
}

// Publishes the open regions in the arbiter.
void LatencyActivity::publish_regions() noexcept {
  arbiter::Slot& self = table_->slot(slot());
  self.regions.store(regions_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  self.deadline_ns.store(earliest(deadlines_), std::memory_order_relaxed);
}

bool LatencyActivity::gpu_is_anothers() const noexcept {
  const std::uint64_t others = table_->layout().best_effort.load(std::memory_order_relaxed) & ~own_best_effort_.load();
  return !mps_ && others != 0;
}

void LatencyActivity::enter_region(const Region& region) noexcept {
  bool alone = false;
  {
    const std::scoped_lock lock(probe_);
    had_region_ = true;
    count_pending(now_ns());  // work of theirs that is still on the GPU cannot be told from this one's
    alone = regions_.fetch_add(1, std::memory_order_acq_rel) == 0 && !active_.load();
    if (region.deadline_ns != 0) {
      const auto free = std::find(deadlines_.begin(), deadlines_.end(), 0);
      if (free != deadlines_.end()) *free = region.deadline_ns;
    }
    publish_regions();
    table_->slot(slot()).heartbeat_ns.store(now_ns(), std::memory_order_relaxed);  // or no peer believes it
    if (region.priority != 0) table_->set_priority(slot(), region.priority);
    requests_.enter(region.slo_ns, alone);
    if (alone) {
      region_key_.store(key_of(region), std::memory_order_relaxed);
      region_deadline_ns_.store(region.deadline_ns, std::memory_order_relaxed);
    } else {
      segments_.lose();
    }
    last_launch_ns_ = now_ns();
  }
  hot().ticker.wake();
  // Within a request nothing waits.
  if (by_deadline_ && latency_regions(this_thread()) <= 1) {
    wait_for_entry();
    const std::scoped_lock lock(probe_);
    last_launch_ns_ = now_ns();  // from when on it may lapse
  }
  activate();
  if (!alone) return;
  // Best effort holds back by now, unless it is to have the gaps of this request.
  const std::scoped_lock lock(probe_);
  if (prewarmer_.pays() && gpu_is_anothers() && !segments_.lets_in()) prewarmer_.prewarm();
  prewarmer_.entered(now_ns());
}

void LatencyActivity::on_waited() noexcept {
  on_synchronised();
  if (segments_.on() && active_.load(std::memory_order_relaxed)) {
    segments_.waited(now_ns(), driver::shareable_context());
  }
}

void LatencyActivity::exit_region(const Region& region, bool counts) noexcept {
  {
    const std::scoped_lock lock(probe_);
    const bool last = regions_.fetch_sub(1, std::memory_order_acq_rel) == 1;
    if (region.deadline_ns != 0) {
      const auto ours = std::find(deadlines_.begin(), deadlines_.end(), region.deadline_ns);
      if (ours != deadlines_.end()) *ours = 0;
    }
    publish_regions();
    prewarmer_.left();
    if (last) table_->set_priority(slot(), priority_);
  }
  on_synchronised();
  if (!counts || region.counted == Region::kUncounted) return;
  const std::scoped_lock lock(probe_);
  const bool works = active_.load() && regions_.load() == 0;
  if (works && pending_count_ < kMostPending) {
    pending_[pending_count_++] = region;
  } else {
    count_region(region, now_ns());
  }
}

void LatencyActivity::wait_for_entry() noexcept {
  constexpr std::int64_t kPauseNs = 50 * kNsPerUs;
  std::optional<GilReleased> released;  // once it is clear that it waits
  const std::int64_t since = now_ns();
  schedule::EntryView view;
  // By the client's own words: were two clients to see each other differently, both might wait.
  const auto entrant = [&](int of) {
    const arbiter::Slot& client = table_->slot(of);
    return schedule::Entrant{of, client.priority.load(std::memory_order_relaxed),
                             client.deadline_ns.load(std::memory_order_relaxed)};
  };
  std::array<schedule::Entrant, arbiter::kSlotCount> others;
  for (std::int64_t reaped = since;;) {
    const std::int64_t now = now_ns();
    std::size_t count = 0;
    std::uint64_t there = 0;
    for (std::uint64_t rest = table_->latency_clients(); rest != 0; rest &= rest - 1) {
      const int other = __builtin_ctzll(rest);
      const arbiter::Slot& client = table_->slot(other);
      if (other == slot() || client.regions.load(std::memory_order_relaxed) == 0) continue;
      if (!schedule::is_fresh(client.heartbeat_ns.load(std::memory_order_relaxed), now, stale_heartbeat_ns_)) continue;
      there |= std::uint64_t{1} << other;
      others[count++] = entrant(other);
    }
    view.self = entrant(slot());
    view.others = std::span(others).first(count);
    view.waited_ns = now - since;
    if (schedule::earliest_deadline_first(view).answer == schedule::Answer::kSubmit) return;
    if (now - reaped > 5 * kNsPerMs) {
      reaped = now;
      table_->reap(there);
    }
    if (!released) released.emplace();
    sleep_ns(kPauseNs);
  }
}

std::int64_t LatencyActivity::others_slack_ns() const noexcept {
  if (!registered()) return schedule::Snapshot::kUnknownNs;
  return schedule::other_requests_slack_ns(table_->layout(), slot(), stale_heartbeat_ns_, now_ns());
}

void LatencyActivity::expect(std::int64_t within_ns) noexcept {
  {
    const std::scoped_lock lock(probe_);
    const std::int64_t now = now_ns();
    requests_.expect(within_ns, now);
    table_->slot(slot()).heartbeat_ns.store(now, std::memory_order_relaxed);  // or no peer believes it
    if (gpu_is_anothers()) prewarmer_.prewarm();
  }
  hot().ticker.wake();
}

void LatencyActivity::tick(std::int64_t now) noexcept {
  write_again();
  const std::uint64_t launches_now = launches_.load(std::memory_order_acquire);
  const bool launched = launches_now != launches_at_tick_;
  const bool active = active_.load(std::memory_order_acquire);
  const std::int64_t active_since = active_since_ns_.load(std::memory_order_relaxed);
  launched_since_last_tick_ = launched || active_since != active_since_at_tick_;
  active_since_at_tick_ = active_since;
  {
    const std::scoped_lock lock(probe_);
    if (launched_since_last_tick_) last_launch_ns_ = now;
    launching_since_ns_ = !launching() ? 0 : launching_since_ns_ == 0 ? now : launching_since_ns_;
    if (launched) {
      launches_at_tick_ = launches_now;
      table_->slot(slot()).last_launch_ns.store(now, std::memory_order_relaxed);
    }
    if (!active_.load(std::memory_order_relaxed)) {
      if (gpu_is_anothers() && requests_.get_ready(now)) prewarmer_.prewarm_last_context();
      requests_.look_ahead(now);
    }
  }
  if (active) {
    settle(/*by_ticker=*/true, now);
  } else if (launches_now != launches_when_idle_.load(std::memory_order_relaxed)) {
    activate();
  }
}

void LatencyActivity::forget_stream(CUstream stream) noexcept {
  const std::scoped_lock lock(probe_);
  streams_.forget_stream(stream);
}

void LatencyActivity::forget_all_streams() noexcept {
  const std::scoped_lock lock(probe_);
  prewarmer_.worked_in(nullptr);
  segments_.forget_events();
  // A primary context that is released may live on, and other contexts do.
  streams_.forget_all(active_.load());
}

void LatencyActivity::set_priority(std::int32_t priority) noexcept {
  const std::scoped_lock lock(probe_);
  priority_ = priority;
}

void LatencyActivity::forget_context(CUcontext context) noexcept {
  const std::scoped_lock lock(probe_);
  prewarmer_.forget(context);
}

void LatencyActivity::capture_begins() noexcept {
  const std::scoped_lock lock(probe_);
  hot().captures.fetch_add(1, std::memory_order_relaxed);
}

void LatencyActivity::capture_ends() noexcept {
  const std::scoped_lock lock(probe_);
  auto& captures = hot().captures;
  captures.store(std::max(0, captures.load(std::memory_order_relaxed) - 1), std::memory_order_relaxed);
}

}  // namespace cudasched::runtime
