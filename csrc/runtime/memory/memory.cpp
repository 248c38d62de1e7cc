#include "runtime/memory/memory.hpp"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <new>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "arbiter/table.hpp"
#include "base/blocked_signals.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/size_text.hpp"
#include "base/sleep.hpp"
#include "driver/barrier.hpp"
#include "driver/driver.hpp"
#include "runtime/engine.hpp"
#include "runtime/hot.hpp"
#include "runtime/memory/torch_cache.hpp"
#include "runtime/settings.hpp"
#include "schedule/give_back.hpp"

namespace cudasched::runtime {
namespace {

constexpr std::int64_t kSayAgainNs = 10 * kNsPerSecond;
constexpr std::int64_t kGiverLookNs = kNsPerSecond / 2;  // should a wake-up have gone astray
constexpr std::int64_t kPagerLookNs = 20 * kNsPerMs;     // where memory can move
constexpr std::uint64_t kMostMoveSeconds = 60;  // a second a GiB: the host's memory may have to be pinned first
constexpr std::int64_t kCacheLookNs = 200 * kNsPerMs;
constexpr std::int64_t kPoolLookNs = 200 * kNsPerMs;
constexpr std::int64_t kDeadLookNs = 5 * kNsPerMs;  // between two looks for dead clients, while waiting

constexpr std::uint64_t bit_of(int slot) noexcept { return std::uint64_t{1} << slot; }

template <typename Visit>
void for_each_slot(std::uint64_t slots, Visit&& visit) {
  for (; slots != 0; slots &= slots - 1) visit(std::countr_zero(slots));
}

schedule::MemoryRequest request_of(arbiter::Table& table, int slot) noexcept {
  const arbiter::SlotMemory& words = table.memory(slot);
  return {words.request.load(std::memory_order_acquire), words.request_until_ns.load(std::memory_order_acquire)};
}

schedule::MemoryGiver giver_of(arbiter::Table& table, int slot) noexcept {
  const arbiter::SlotMemory& words = table.memory(slot);
  return {true, words.gives.load(std::memory_order_acquire) != 0, words.answered.load(std::memory_order_acquire)};
}

std::string client_text(arbiter::Table& table, int slot) {
  const arbiter::Slot& entry = table.slot(slot);
  return arbiter::text(entry.name) + " (" + std::to_string(entry.pid.load()) + ")";
}

// "train.py (4711) 40.2 GiB best_effort, ...", the largest first.
std::string holders_text(arbiter::Table& table) {
  struct Holder {
    std::uint64_t bytes;
    int slot;
  };
  constexpr std::size_t kMostNamed = 6;
  std::vector<Holder> holders;
  for (int slot = 0; slot < arbiter::kSlotCount; ++slot) {
    const std::uint64_t bytes = table.memory(slot).held_bytes.load(std::memory_order_relaxed);
    if (table.slot(slot).occupied.load() != 0 && bytes != 0) holders.push_back({bytes, slot});
  }
  std::ranges::sort(holders, std::greater<>(), &Holder::bytes);
  std::string text;
  for (std::size_t i = 0; i < holders.size() && i < kMostNamed; ++i) {
    const std::uint32_t value = table.slot(holders[i].slot).client_class.load();
    text += (text.empty() ? "" : ", ") + client_text(table, holders[i].slot) + " " + size_text(holders[i].bytes);
    if (value < static_cast<std::uint32_t>(kClassCount)) {
      text += " " + std::string(class_name(static_cast<Class>(value)));
    }
  }
  if (holders.size() > kMostNamed) text += " and " + std::to_string(holders.size() - kMostNamed) + " more";
  return text;
}

// On a thread of its own, which leaves signals to the host program's. False: there is none to be had.
template <typename Work>
bool run_apart(Work&& work) noexcept {
  bool runs = true;
  try {
    const BlockedSignals blocked;
    std::thread(std::forward<Work>(work)).detach();
  } catch (const std::exception&) {
    runs = false;
  }
  return runs;
}

}  // namespace

Memory& memory() noexcept {
  // Never destroyed: other threads may still free while the process exits.
  alignas(Memory) static unsigned char storage[sizeof(Memory)];
  static Memory* const instance = new (storage) Memory();
  return *instance;
}

void Memory::configure(const Settings& settings) {
  const std::uint64_t held = holdings.most_held();
  if (settings.memory_limit != 0 && settings.memory_limit < held) {
    throw ConfigError("memory_limit=" + std::to_string(settings.memory_limit) + " is below the " + size_text(held) +
                      " that this program holds on a GPU: free some first, or set it higher");
  }
  holdings.set_limit(settings.memory_limit);
  pageable.configure(settings.pageable);
  pager.configure(settings.park);
  pager.take_turns(settings.give_back_ns == 0 ? 0 : settings.memory_turn_ns);
  if (settings.pageable && settings.park != 0) driver::barrier().arm();
  give_back_ns_.store(settings.give_back_ns, std::memory_order_relaxed);
}

Class Memory::class_of_thread() noexcept {
  if (const Region* const region = this_thread().innermost()) return region->region_class;
  return hot().process_class.load(std::memory_order_relaxed);
}

// ---- words for others

void Memory::publish(int device) noexcept {
  if (Device* const known = engine().known_device(device)) publish(*known);
}

void Memory::publish(Device& device) noexcept {
  if (device.table().lost()) return;
  std::uint64_t elsewhere = 0;  // in classes that are no clients
  int first = -1;
  for (int i = 0; i < kClassCount; ++i) {
    const auto each = static_cast<Class>(i);
    if (!device.registered(each)) {
      elsewhere += holdings.there(device.ordinal(), each);
    } else if (first < 0) {
      first = i;
    }
  }
  for (int i = std::max(first, 0); first >= 0 && i < kClassCount; ++i) {
    const auto each = static_cast<Class>(i);
    const int slot = device.slot(each);
    if (slot < 0) continue;
    arbiter::SlotMemory& words = device.table().memory(slot);
    const std::uint64_t held = holdings.there(device.ordinal(), each) + (i == first ? elsewhere : 0);
    const std::uint64_t away = each == Class::kBestEffort ? std::min(held, pager.away()) : 0;
    words.away_bytes.store(away, std::memory_order_relaxed);
    words.held_bytes.store(held - away, std::memory_order_relaxed);
    words.peak_bytes.store(holdings.peak(device.ordinal()), std::memory_order_relaxed);
    words.limit_bytes.store(holdings.limit(), std::memory_order_relaxed);
    if (!pager.has_turns()) words.turn_until_ns.store(0, std::memory_order_relaxed);  // of a damaged table
    if (each != Class::kBestEffort) continue;
    pager.join_turns(device);
    pager.say_movable(device);
  }
  start_giver(device);
}

void Memory::publish_pools(std::int64_t now) noexcept {
  if (now - looked_pools_ns_ < kPoolLookNs) return;
  looked_pools_ns_ = now;
  engine().for_each_device([&](Device& device) {
    if (device.table().lost()) return;
    std::optional<cudasched_pool_sizes> sizes = pools.read(device.ordinal());
    for (int i = 0; sizes && i < kClassCount; ++i) {
      const int slot = device.slot(static_cast<Class>(i));
      if (slot < 0) continue;
      arbiter::SlotMemory& words = device.table().memory(slot);
      words.pool_reserved_bytes.store(sizes->reserved, std::memory_order_relaxed);
      words.pool_allocated_bytes.store(sizes->allocated, std::memory_order_relaxed);
      words.pool_largest_free_bytes.store(sizes->largest_free, std::memory_order_relaxed);
      *sizes = {};  // another client of the process shows none
    }
  });
}

bool Memory::may_say(std::atomic<std::int64_t>& said_ns) noexcept {
  const std::int64_t now = now_ns();
  std::int64_t said = said_ns.load(std::memory_order_relaxed);
  return (said == 0 || now - said >= kSayAgainNs) && said_ns.compare_exchange_strong(said, now);
}

void Memory::report_failure(int device, Class client_class, std::uint64_t bytes,
                            const std::string& unanswered) noexcept {
  Device* const known = engine().known_device(device);
  if (known == nullptr || known->table().lost()) return;
  try {
    bool beside_others = !unanswered.empty() || client_class == Class::kLatency;
    for (int slot = 0; slot < arbiter::kSlotCount && !beside_others; ++slot) {
      bool own = false;
      for (int i = 0; i < kClassCount; ++i) own = own || known->slot(static_cast<Class>(i)) == slot;
      beside_others =
          !own && known->table().slot(slot).occupied.load() != 0 && known->table().memory(slot).held_bytes.load() != 0;
    }
    if (!beside_others || !may_say(said_failure_ns_)) return;
    publish(*known);
    std::string text = "GPU " + std::to_string(device) + " has no " + size_text(bytes) + " left for this program (" +
                       std::string(class_name(client_class)) + ")";
    std::size_t free_bytes = 0;
    std::size_t all_bytes = 0;
    auto* const get_info = driver::table().cuMemGetInfo;
    if (driver::current_device() == device && get_info != nullptr &&
        get_info(&free_bytes, &all_bytes) == CUDA_SUCCESS) {
      text += "; " + size_text(free_bytes) + " of " + size_text(all_bytes) + " are free";
    }
    const std::string holders = holders_text(known->table());
    text += ". Holders: " + (holders.empty() ? "no client of cudasched holds any" : holders);
    if (!unanswered.empty()) text += ". Did not give memory back in time: " + unanswered;
    log::warning(text);
  } catch (const std::exception&) {  // no memory for a message
  }
}

std::uint64_t Memory::room(int device) noexcept {
  if (holdings.limit() == 0 || device < 0 || device >= Holdings::kDevices) return kUnknownMemory;
  std::atomic<Integrated>& known = integrated_[static_cast<std::size_t>(device)];
  if (known.load(std::memory_order_relaxed) == Integrated::kUnasked) {
    int value = 0;
    driver::table().cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_INTEGRATED, device);
    known.store(value != 0 ? Integrated::kYes : Integrated::kNo, std::memory_order_relaxed);
  }
  return known.load(std::memory_order_relaxed) == Integrated::kYes ? available_host_bytes() : kUnknownMemory;
}

void Memory::report_limit(int device, std::uint64_t bytes) noexcept {
  if (!may_say(said_limit_ns_)) return;
  try {
    const std::uint64_t left = room(device);
    log::warning(
        "an allocation of " + size_text(bytes) + " on GPU " + std::to_string(device) +
        " was refused by the memory limit of this program, " + size_text(holdings.limit()) + ": it holds " +
        size_text(holdings.held(device)) +
        (left < bytes ? "; the GPU has the host's memory, of which " + size_text(left) + " are available" : ""));
  } catch (const std::exception&) {
  }
}

void Memory::refresh_pools(int device) noexcept {
  auto* const get = driver::table().cuMemPoolGetAttribute;
  if (get == nullptr) return;
  try {
    std::vector<Holdings::Pool> of_driver;
    holdings.list_pools(device, of_driver);
    for (const Holdings::Pool& each : of_driver) {
      cuuint64_t bytes = 0;
      if (get(reinterpret_cast<CUmemoryPool>(each.pool), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes) ==
          CUDA_SUCCESS) {
        holdings.hold_pool(each.pool, each.device, each.client_class, bytes);
      }
    }
  } catch (const std::exception&) {
  }
}

// ---- going after others

bool Memory::asked(arbiter::Table& table) noexcept {
  bool asks = false;
  for_each_slot(table.layout().memory.requests.load(std::memory_order_acquire),
                [&](int slot) { asks = asks || schedule::is_open(request_of(table, slot), now_ns()); });
  return asks;
}

void Memory::yield(int device, Class client_class) noexcept {
  if (client_class != Class::kBestEffort) return;
  Device* const known = engine().known_device(device);
  if (known == nullptr || known->table().layout().memory.requests.load(std::memory_order_relaxed) == 0) return;
  wait_for_requests(*known);
}

// A process with latency work of its own waits for no client: its requests may need locks that this thread holds.
void Memory::wait_for_requests(Device& device) noexcept {
  arbiter::Table& table = device.table();
  std::int64_t looked_ns = now_ns();
  while (!table.lost() && !device.registered(Class::kLatency)) {
    const std::uint32_t seen = table.layout().memory.sequence.load(std::memory_order_acquire);
    const int slot = device.slot(Class::kBestEffort);
    const std::int64_t now = now_ns();
    const schedule::MemoryGiver own = slot < 0 ? schedule::MemoryGiver{} : giver_of(table, slot);
    const std::uint64_t asking = table.layout().memory.requests.load(std::memory_order_acquire);
    bool waits = false;
    for_each_slot(asking, [&](int other) { waits = waits || schedule::yields(request_of(table, other), own, now); });
    if (!waits) return;
    if (now - looked_ns >= kDeadLookNs) {
      looked_ns = now;
      table.reap(asking);
      continue;
    }
    table.sleep_for_memory(seen, kDeadLookNs);
  }
}

// ---- giving

void Memory::use_cache(cudasched_release_cache release, void* context) {
  release_context_.store(context);
  release_.store(release, std::memory_order_release);
  engine().for_each_device([&](Device& device) { start_giver(device); });
}

void Memory::look_for_cache(std::int64_t now) noexcept {
  if (decided_ || give_back_ns() == 0 || now - looked_ns_ < kCacheLookNs) return;
  looked_ns_ = now;
  bool best_effort = false;
  engine().for_each_device([&](const Device& device) {
    best_effort = best_effort || (device.registered(Class::kBestEffort) && !device.registered(Class::kLatency));
  });
  if (!best_effort || release_.load() != nullptr || !torch_is_loaded()) return;
  decided_ = true;
  // The ticker has to go on meanwhile.
  run_apart([this] {
    cudasched_release_cache none = nullptr;
    if (const cudasched_release_cache found = find_torch_cache()) release_.compare_exchange_strong(none, found);
  });
}

bool Memory::can_give(const Device& device) noexcept {
  if (give_back_ns() == 0 || !device.registered(Class::kBestEffort) || device.registered(Class::kLatency)) return false;
  if (release_.load(std::memory_order_acquire) != nullptr || pools.any(device.ordinal())) return true;
  try {
    std::vector<Holdings::Pool> of_driver;
    holdings.list_pools(device.ordinal(), of_driver);
    return !of_driver.empty();
  } catch (const std::exception&) {
    return false;
  }
}

void Memory::start_giver(Device& device) noexcept {
  const int ordinal = device.ordinal();
  if (give_back_ns() == 0 || stopped_.load() || !hot().scheduling.load() || device.table().lost() || ordinal < 0 ||
      ordinal >= Holdings::kDevices || !device.registered(Class::kBestEffort))
    return;
  std::atomic<bool>& runs = giver_runs_[static_cast<std::size_t>(ordinal)];
  if (runs.load(std::memory_order_relaxed)) return;
  const bool parks = driver::barrier().armed() && pageable.pool_made() != nullptr;
  const bool can = can_give(device);
  if (!(parks || can) || runs.exchange(true)) return;
  // Before the thread's first look: a client may ask at once.
  std::atomic<std::uint32_t>& gives = device.table().memory(device.slot(Class::kBestEffort)).gives;
  gives.store(can ? 1 : 0, std::memory_order_release);
  const bool started = run_apart([this, &device, &runs] {
    run_giver(device);
    runs.store(false);
  });
  if (started) return;
  gives.store(0, std::memory_order_release);
  runs.store(false);  // the next tick tries again
}

void Memory::run_giver(Device& device) noexcept {
  pthread_setname_np(pthread_self(), "cudasched-mem");
  this_thread().empties_cache = true;
  arbiter::Table& table = device.table();
  while (!table.lost() || pager.away() != 0) {
    const std::uint32_t seen = table.layout().memory.sequence.load(std::memory_order_acquire);
    giving_.fetch_add(1);
    // Once stop() has seen no client give, the slot may be another client's.
    const bool stopped = stopped_.load();
    const bool ends = stopped || table.lost() || !hot().scheduling.load();
    bool answered = false;
    if (!stopped && !table.lost()) {
      arbiter::SlotMemory& words = table.memory(device.slot(Class::kBestEffort));
      // Or others would wait for its answers.
      if (ends) words.gives.store(0, std::memory_order_release);
      answered = !ends && answer_request(device, words);
    }
    if (!stopped && !answered) {
      const std::uint64_t before = pager.away();
      pager.tend(device, !ends && asked(table));
      if (pager.away() != before) publish(device);
    }
    giving_.fetch_sub(1);
    if (stopped || (ends && pager.away() == 0)) return;
    if (!answered) table.sleep_for_memory(seen, driver::barrier().armed() ? kPagerLookNs : kGiverLookNs);
  }
}

// False: no client asks.
bool Memory::answer_request(Device& device, arbiter::SlotMemory& words) noexcept {
  arbiter::Table& table = device.table();
  const bool empties = empties_[static_cast<std::size_t>(device.ordinal())].load();
  // While memory is away, caches cannot be emptied, as their queued work waits; nor while a thread waits for its turn.
  const bool can_empty = !empties && pager.away() == 0 && !pager.waits() && can_give(device);
  words.gives.store(can_empty || empties ? 1 : 0, std::memory_order_release);
  std::uint64_t number = 0;
  std::uint64_t to_move = 0;
  const schedule::MemoryGiver own = giver_of(table, device.slot(Class::kBestEffort));
  for_each_slot(table.layout().memory.requests.load(std::memory_order_acquire), [&](int other) {
    const arbiter::SlotMemory& asker = table.memory(other);
    schedule::MemoryGiver giver = own;
    const bool moves = asker.request_moves.load(std::memory_order_relaxed) != 0;
    if (moves ? pager.rests() : empties) return;  // it is answered later
    if (moves) giver.gives = pager.movable() != 0;
    const std::uint64_t asked = schedule::answer_for(request_of(table, other), giver, now_ns());
    if (asked != 0 && moves) to_move += asker.request_bytes.load(std::memory_order_relaxed);
    number = std::max(number, asked);
  });
  if (number == 0) return false;
  // A capture may not be disturbed, and keeps its allocations.
  if (to_move == 0 && can_empty && !hot().may_capture()) {
    empty_caches_and_answer(device, number);
  } else {
    const std::uint64_t before = holdings.there(device.ordinal()) - pager.away();
    answer(device, number, to_move != 0 && pager.park(device, to_move), before);
  }
  return true;
}

// On a thread of its own: the cache's lock may be held by one that waits for memory.
void Memory::empty_caches_and_answer(Device& device, std::uint64_t number) noexcept {
  std::atomic<bool>& empties = empties_[static_cast<std::size_t>(device.ordinal())];
  const auto empty = [this, &device, &empties, number] {
    this_thread().empties_cache = true;
    const std::uint64_t before = holdings.there(device.ordinal());
    empty_caches(device);
    empties.store(false);
    if (!device.table().lost()) answer(device, number, true, before);
    giving_.fetch_sub(1);
  };
  giving_.fetch_add(1);
  empties.store(true);
  if (!run_apart(empty)) empty();
}

void Memory::answer(Device& device, std::uint64_t number, bool gave, std::uint64_t before) noexcept {
  arbiter::SlotMemory& words = device.table().memory(device.slot(Class::kBestEffort));
  if (gave) {
    const std::uint64_t after = holdings.there(device.ordinal()) - pager.away();
    words.given_bytes.fetch_add(before > after ? before - after : 0, std::memory_order_relaxed);
    publish(device);
  } else {
    words.refusals.fetch_add(1, std::memory_order_relaxed);
  }
  std::uint64_t answered = words.answered.load();
  while (answered < number && !words.answered.compare_exchange_weak(answered, number, std::memory_order_release)) {
  }
  device.table().wake_for_memory();
}

// With the device's primary context current, as the allocators that give have it.
void Memory::empty_caches(const Device& device) noexcept {
  const driver::RelaxedCapture relaxed;
  CUcontext context = nullptr;
  if (driver::table().cuDevicePrimaryCtxRetain(&context, device.ordinal()) != CUDA_SUCCESS) return;
  {
    const driver::CurrentContext current(context);
    if (current.ok()) {
      if (const cudasched_release_cache release = release_.load(std::memory_order_acquire); release != nullptr) {
        release(device.ordinal(), release_context_.load());
      }
      pools.trim(device.ordinal());
      try {
        std::vector<Holdings::Pool> of_driver;
        holdings.list_pools(device.ordinal(), of_driver);
        for (const Holdings::Pool& each : of_driver) {
          if (driver::table().cuMemPoolTrimTo != nullptr) {
            driver::table().cuMemPoolTrimTo(reinterpret_cast<CUmemoryPool>(each.pool), 0);
          }
        }
      } catch (const std::exception&) {
      }
      refresh_pools(device.ordinal());
    }
  }
  driver::table().cuDevicePrimaryCtxRelease(device.ordinal());
}

// The allocator may be taken down when this returns.
void Memory::stop() noexcept {
  stopped_.store(true);
  const std::int64_t until = now_ns() + kNsPerSecond;
  while (giving_.load() != 0 && now_ns() < until) sleep_ns(kNsPerMs);
  driver::barrier().end();
}

void Memory::reset_in_child() noexcept {
  holdings.reset_in_child();
  giving_.store(0);
  stopped_.store(false);
  new (&asking_) Asking;  // the parent's thread may hold the lock
  new (&pools) Pools;     // and this one
  pageable.reset_in_child();
  pager.reset_in_child();
  driver::barrier().reset_in_child();
  for (auto& runs : giver_runs_) runs.store(false);
  for (auto& empties : empties_) empties.store(false);
  decided_ = false;
  said_failure_ns_.store(0);
  said_limit_ns_.store(0);
}

// ---- asking

MemoryRequest::MemoryRequest(int device, std::uint64_t bytes) noexcept : bytes_(bytes) {
  Device* const known = engine().known_device(device);
  if (memory().give_back_ns() == 0 || known == nullptr || device >= Holdings::kDevices ||
      !hot().scheduling.load(std::memory_order_relaxed))
    return;
  std::size_t all_bytes = 0;
  if (driver::table().cuDeviceTotalMem(&all_bytes, device) == CUDA_SUCCESS && bytes > all_bytes) return;
  // A client asks; one that has launched nothing yet becomes one here.
  if (!engine().prepare(*known, Class::kLatency, this_thread()) || known->table().lost()) return;
  device_ = known;
  ask(/*for_moves=*/false);
}

// False: no client can give or move anything, or none has moved any since the last time, and that time is over.
bool MemoryRequest::ask(bool for_moves) noexcept {
  arbiter::Table& table = device_->table();
  const int own = device_->slot(Class::kBestEffort);
  if (own >= 0) table.memory(own).gives.store(0);
  table.reap();
  std::uint64_t givers = 0;
  std::uint64_t movable = 0;
  for_each_slot(table.layout().best_effort.load(std::memory_order_acquire), [&](int slot) {
    const arbiter::SlotMemory& words = table.memory(slot);
    const std::uint64_t bytes = words.movable_bytes.load(std::memory_order_acquire);
    if (slot == own || (for_moves ? bytes == 0 : words.gives.load(std::memory_order_acquire) == 0)) return;
    givers |= bit_of(slot);
    movable += bytes;
  });
  if (givers == 0) return false;
  std::uint64_t lacks = bytes_;
  bool again = false;
  if (for_moves) {
    std::size_t free_bytes = 0;
    std::size_t all_bytes = 0;
    driver::table().cuMemGetInfo(&free_bytes, &all_bytes);
    again = moves_ && free_bytes <= free_bytes_;
    if (again && now_ns() >= until_ns_) return false;
    if (moves_ && (!again || driver::current_device() != device_->ordinal())) spare_bytes_ *= 2;
    free_bytes_ = free_bytes;
    lacks = std::min(bytes_ - std::min<std::uint64_t>(bytes_, free_bytes) + spare_bytes_, movable);
  }
  {
    // One slot for all threads of the process: the newest request stands in it, and answers to that answer the others.
    Memory::Asking& asking = memory().asking_;
    const SpinGuard guard(asking.lock);
    if (!guard.owns()) return false;
    if (!again) {
      until_ns_ = now_ns() + memory().give_back_ns();
      if (for_moves) {
        until_ns_ += static_cast<std::int64_t>(std::min<std::uint64_t>(lacks >> 30, kMostMoveSeconds)) * kNsPerSecond;
        until_ns_ = std::min(until_ns_, now_ns() + schedule::kLongestRequestNs);
      }
    }
    number_ = table.layout().memory.made.fetch_add(1) + 1;
    if (!table.ask_for_memory(device_->slot(Class::kLatency), number_, lacks, until_ns_, for_moves)) return false;
    owed_ = givers;
    moves_ = for_moves;
    if (!std::exchange(asks_, true)) ++asking.requests[static_cast<std::size_t>(device_->ordinal())];
  }
  table.wake_for_memory();
  return true;
}

MemoryRequest::~MemoryRequest() {
  if (!asks_) return;
  arbiter::Table& table = device_->table();
  {
    Memory::Asking& asking = memory().asking_;
    const SpinGuard guard(asking.lock);
    if (!guard.owns()) return;
    const bool others = --asking.requests[static_cast<std::size_t>(device_->ordinal())] > 0;
    if (others || table.lost()) return;
    // The slot that the client has now: its table may have been replaced since, and the one that it had be another's.
    table.end_request_for_memory(device_->slot(Class::kLatency));
  }
  table.wake_for_memory();
}

std::uint64_t MemoryRequest::owing() const noexcept {
  arbiter::Table& table = device_->table();
  std::uint64_t found = 0;
  for_each_slot(owed_, [&](int slot) {
    schedule::MemoryGiver giver = giver_of(table, slot);
    giver.alive = table.slot(slot).occupied.load() != 0;
    if (moves_) giver.gives = table.memory(slot).movable_bytes.load(std::memory_order_acquire) != 0;
    if (schedule::owes_answer({number_, until_ns_}, giver)) found |= bit_of(slot);
  });
  return found;
}

bool MemoryRequest::next() noexcept {
  if (device_ == nullptr || over_ || device_->table().lost()) return false;
  if (owed_ == 0 && !ask(/*for_moves=*/true)) return false;
  arbiter::Table& table = device_->table();
  std::int64_t looked_ns = now_ns();
  while (true) {
    const std::uint32_t seen = table.layout().memory.sequence.load(std::memory_order_acquire);
    const std::uint64_t left = owing();
    if (left != owed_) {
      owed_ = left;
      return true;
    }
    const std::int64_t now = now_ns();
    // A cache that is being emptied may have freed enough already.
    if (now >= until_ns_ || table.lost()) {
      late_ |= std::exchange(owed_, 0);
      over_ = moves_;
      return true;
    }
    if (now - looked_ns >= kDeadLookNs) {
      looked_ns = now;
      if (table.reap(owed_) > 0) continue;
    }
    table.sleep_for_memory(seen, std::min(kDeadLookNs, until_ns_ - now));
  }
}

std::string MemoryRequest::unanswered() const {
  std::string text;
  if (device_ == nullptr) return text;
  for_each_slot(owed_ | late_,
                [&](int slot) { text += (text.empty() ? "" : ", ") + client_text(device_->table(), slot); });
  return text;
}

}  // namespace cudasched::runtime
