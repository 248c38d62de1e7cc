#include "runtime/device.hpp"

#include <atomic>
#include <bit>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/undisturbed.hpp"
#include "driver/driver.hpp"
#include "queue/router.hpp"
#include "runtime/predictor_files.hpp"
#include "telemetry/trace.hpp"

namespace cudasched::runtime {

Device::Device(CUdevice handle, int ordinal, const Settings& settings)
    : handle_(handle), ordinal_(ordinal), slice_length_(settings.time_slice_us) {
  const std::string directory = settings.run_directory.empty() ? arbiter::default_directory() : settings.run_directory;
  table_ = arbiter::Table::open(directory, driver::device_uuid(handle), driver::device_name(handle));
  const auto attribute = [handle](CUdevice_attribute which) {  // 0: not known, which no device is refused for
    int value = 0;
    return driver::table().cuDeviceGetAttribute(&value, which, handle) == CUDA_SUCCESS ? value : 0;
  };
  telemetry::trace_device({.ordinal = ordinal,
                           .major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                           .minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
                           .sm_count = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
                           .max_threads_per_sm = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)});
}

void Device::prepare_predictor(const Settings& settings, const predict::Allocations* allocations) noexcept {
  std::call_once(predictor_prepared_, [&] {
    const Undisturbed undisturbed;
    const auto or_without = [](auto&& attempt) {
      try {
        attempt();
      } catch (const std::bad_alloc&) {
        log::warning("there is not enough memory to predict times by trees or by what was learned before");
      } catch (const std::exception& error) {
        log::warning(std::string(error.what()) + "; going on without");
      }
    };
    or_without([&] {
      trees_ = load_trees(settings, driver::device_attribute(handle_, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                          driver::device_attribute(handle_, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
                          driver::device_name(handle_));
    });
    gate.use(trees_.get(), allocations);
    or_without([&] {
      state_path_ = state_path(settings, driver::device_uuid(handle_));
      if (state_path_.empty()) return;
      const std::vector<std::byte> state = read_state(state_path_);
      if (!state.empty()) gate.restore(state);
    });
  });
}

bool Device::save_predictor() noexcept {
  if (state_path_.empty() || !registered(Class::kBestEffort)) return true;
  try {
    const std::vector<std::byte> state = gate.save();
    if (!state.empty()) write_state(state_path_, state);
    return true;
  } catch (const std::exception& error) {
    log::info(error.what());  // a read-only home is no fault
    return false;
  }
}

void Device::start_queue(bool spins) noexcept {
  if (owned_queue_ != nullptr) return;
  try {
    owned_queue_ = std::make_unique<queue::Queue>(admission_, &holds_gil);
    owned_queue_->serve(ordinal_);
  } catch (const std::bad_alloc&) {
    log::warning("no memory for a launch queue: best-effort launches wait on the program's own threads");
    return;
  }
  if (!owned_queue_->start(spins ? queue::Launcher::Idle::kSpins : queue::Launcher::Idle::kSleeps)) {
    log::warning("the launch queue did not start: best-effort launches wait on the program's own threads");
    return;
  }
  queue::router().add(*owned_queue_);
  queue_.store(owned_queue_.get(), std::memory_order_release);
}

arbiter::Condition Device::tend(std::int64_t now, bool at_once) noexcept {
  const std::scoped_lock lock(tend_);
  const arbiter::Condition found = table_->tend(now, at_once);
  if (found == arbiter::Condition::kSound) return std::exchange(untold_, found);
  if (found != arbiter::Condition::kMoved) return found;
  for (auto& place : slots_) {
    if (const int slot = place.load(); slot >= 0) place.store(table_->slot_now(slot), std::memory_order_release);
  }
  if (const int slot = this->slot(Class::kBestEffort); slot >= 0) {
    latency.note_own_best_effort(slot);
    gate.moved(slot);
  }
  if (const int slot = this->slot(Class::kLatency); slot >= 0) latency.moved(slot);
  return found;
}

void Device::register_client(Class client_class, const Settings& settings, const Graphs* graphs, std::uint64_t job) {
  if (registered(client_class)) return;
  if (const arbiter::Condition found = tend(now_ns(), /*at_once=*/true); found != arbiter::Condition::kSound) {
    const std::scoped_lock lock(tend_);
    untold_ = found;
  }
  arbiter::ClientInfo client;
  client.client_class = client_class;
  client.priority = settings.priority;
  client.weight_milli = settings.weight_milli();
  client.slo_ns = settings.slo_ns;
  client.name = settings.name.empty() ? program_name() : settings.name;
  if (client_class == Class::kBestEffort) client.job = job;
  const int slot = table_->claim(client);
  mps_.store(driver::under_mps(handle_), std::memory_order_relaxed);
  if (client_class == Class::kLatency) {
    latency.register_client(table_.get(), slot, settings, under_mps());
  }
  if (client_class == Class::kBestEffort) {
    latency.note_own_best_effort(slot);
    if (job != 0) {
      peers.join(job, *table_);
      peers.refresh(now_ns());
      gate.use_peers(&peers);
    }
    gate.register_client(table_.get(), slot, settings, &latency, graphs, handle_);
  }
  slots_[static_cast<std::size_t>(client_class)].store(slot, std::memory_order_release);
  int none = -1;
  counts_class_.compare_exchange_strong(none, static_cast<int>(client_class));
}

namespace {

constexpr std::int64_t kStoppedNs = 3 * kNsPerSecond;  // without a heartbeat: an idle client has one each second

// A word of shared memory that says a time: was that within the last second, or is it soon?
bool lately(const std::atomic<std::int64_t>& word, std::int64_t now) noexcept {
  const std::int64_t at_ns = word.load(std::memory_order_relaxed);
  return at_ns > now - kNsPerSecond && at_ns < now + 60 * kNsPerSecond;
}

}  // namespace

template <typename Visit>
void Device::for_each_other(Class client_class, Visit&& visit) noexcept {
  const int own = slot(client_class);
  const arbiter::Layout& layout = table_->layout();
  const auto& clients = client_class == Class::kLatency ? layout.latency : layout.best_effort;
  for (std::uint64_t rest = clients.load(std::memory_order_relaxed); rest != 0; rest &= rest - 1) {
    if (const int other = std::countr_zero(rest); other != own) visit(table_->slot(other));
  }
}

bool Device::beside(Class client_class, std::int64_t now) noexcept {
  bool found = false;
  for_each_other(client_class, [&](const arbiter::Slot& other) {
    found = found || schedule::is_fresh(other.heartbeat_ns.load(std::memory_order_relaxed), now, kStoppedNs);
  });
  return found;
}

std::uint32_t Device::slice_us(std::int64_t now) noexcept {
  schedule::SliceLength::Look seen;
  seen.now_ns = now;
  // Of one that measures and the others, one has work at a time.
  const int own = slot(Class::kBestEffort);
  const bool alone = own >= 0 && schedule::measures(table_->slot(own), now);
  for_each_other(Class::kBestEffort, [&](const arbiter::Slot& other) {
    seen.others += !alone && lately(other.in_flight_until_ns, now) && !schedule::measures(other, now);
  });
  const Gate::Progress progress = gate.progress();
  seen.completions = progress.completions;
  seen.in_flight = progress.in_flight;
  seen.latency_active = (table_->active() & table_->latency_clients()) != 0;
  return slice_length_.look(seen);
}

bool Device::announced(std::int64_t now) noexcept {
  for (std::uint64_t rest = table_->latency_clients(); rest != 0; rest &= rest - 1) {
    if (lately(table_->slot(std::countr_zero(rest)).hint_until_ns, now)) return true;
  }
  return false;
}

bool Device::pauses(std::int64_t now) noexcept {
  bool found = false;
  for_each_other(Class::kBestEffort,
                 [&](const arbiter::Slot& other) { found = found || schedule::measures(other, now); });
  return found;
}

void Device::measure(std::int64_t for_ns, std::int64_t now, cudasched_measuring& found) noexcept {
  found = {};
  arbiter::Slot& own = table_->slot(slot(Class::kBestEffort));
  bool alone = true;
  for_each_other(Class::kBestEffort, [&](const arbiter::Slot& other) {
    alone = false;
    const std::int64_t until = other.in_flight_until_ns.load(std::memory_order_relaxed);
    found.busy_ns = std::max(found.busy_ns, until > now ? std::min(until - now, kNsPerSecond) : 0);
    if (for_ns <= 0 || !schedule::measures(other, now)) return;
    // Between the pauses of two clients, too, the others run; and each of the two has its turn.
    const std::int64_t turn = pauses_.until_ns() + 2 * schedule::kLongestPauseNs - now;
    found.wait_ns = std::max({found.wait_ns, schedule::next_pause_ns(other, now), turn});
  });
  if (for_ns > 0 && !alone && found.wait_ns == 0) found.wait_ns = pauses_.begin(for_ns, now);
  if (for_ns == 0) pauses_.end(now);
  if (for_ns >= 0 && found.wait_ns == 0 && !table_->lost()) {
    // Before the first pause, others learn that this client measures.
    own.hint_until_ns.store(for_ns > 0 ? pauses_.until_ns() : now);
  }
  // Where two begin at once, the one of the lower slot goes first.
  if (for_ns > 0 && found.wait_ns == 0) {
    for_each_other(Class::kBestEffort, [&](const arbiter::Slot& other) {
      if (&other < &own) found.wait_ns = std::max(found.wait_ns, schedule::next_pause_ns(other, now));
    });
    if (found.wait_ns > 0) {
      pauses_.end(now);
      own.hint_until_ns.store(now - schedule::kLongestPauseNs);
    }
  }
  for (std::uint64_t rest = table_->latency_clients(); rest != 0; rest &= rest - 1) {
    const std::int64_t since = table_->slot(std::countr_zero(rest)).active_since_ns.load(std::memory_order_relaxed);
    found.latency_since_ns = std::max(found.latency_since_ns, since);
  }
  found.latency_active = (table_->active() & table_->latency_clients()) != 0;
}

void Device::publish(const arbiter::Counts& counts) noexcept {
  const int beside = counts_class_.load(std::memory_order_acquire);
  if (beside < 0 || table_->lost()) return;
  for (int i = 0; i < kClassCount; ++i) {
    if (const int place = slot(static_cast<Class>(i)); place >= 0) table_->counts(place).set_process(counts.process);
  }
  table_->counts(slot(static_cast<Class>(beside))).publish(counts, counts_version_);
}

}  // namespace cudasched::runtime
