#include "runtime/memory/pager.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <exception>
#include <new>
#include <optional>

#include "arbiter/table.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/size_text.hpp"
#include "driver/barrier.hpp"
#include "driver/driver.hpp"
#include "runtime/device.hpp"
#include "runtime/engine.hpp"
#include "runtime/hot.hpp"
#include "runtime/memory/host_memory.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/memory/pageable.hpp"
#include "schedule/admission.hpp"
#include "schedule/memory_turns.hpp"

namespace cudasched::runtime {
namespace {

using driver::table;

constexpr std::int64_t kInsideNs = kNsPerSecond;   // a call may take so long that was under way
constexpr std::int64_t kRefusedNs = kNsPerSecond;  // after a move that failed
constexpr std::int64_t kCalmNs = 200 * kNsPerMs;   // the GPU has had room
constexpr std::uint64_t kHostPart = 16;            // of the host's available memory, which stays
constexpr std::int64_t kTurnLookNs = 20 * kNsPerMs;
constexpr std::int64_t kLongestLookNs = 5 * kTurnLookNs;
constexpr const char* kHasNone = "it holds no pageable memory";
constexpr std::int64_t kStoppedNs = 3 * kNsPerSecond;  // without a heartbeat: the client takes no turns

std::string rate_text(std::uint64_t bytes, std::int64_t ns) {
  return std::to_string(bytes >> 20) + " MiB in " + std::to_string(ns / kNsPerUs) + " us";
}

// Of the GPU of the current context.
std::uint64_t free_memory() noexcept {
  std::size_t free = 0;
  std::size_t all = 0;
  return table().cuMemGetInfo(&free, &all) == CUDA_SUCCESS ? free : 0;
}

// Of a copy that moves memory.
memory::Bytes piece(const Device& device) noexcept {
  return device.gate.copies_interrupted() ? memory::Parking::kLargePieceBytes : memory::Parking::kPieceBytes;
}

}  // namespace

// Empty: memory can move. Reads atomics alone: any thread.
std::string Pager::why_not(const Device& device) const {
  if (!driver::barrier().armed()) return "the setting park is off";
  if (memory().give_back_ns() == 0) return "the setting give_back_ms is 0";
  if (device.registered(Class::kLatency)) return "it has latency work of its own";
  if (device.queue() == nullptr || !device.queue()->active()) return "its launches are not offloaded";
  if (driver::barrier().pinned())
    return "other contexts, devices or processes may know its memory, or it uses managed memory";
  if (hot().may_capture()) return "it captures a graph";
  return "";
}

bool Pager::park(Device& device, std::uint64_t least) noexcept {
  const std::lock_guard held(moving_);
  try {
    const std::string why = move_away(device, least);
    const bool stays = !why.empty() && why != kHasNone;
    note();
    full_ns_ = now_ns();
    refused_ns_ = stays ? now_ns() : 0;
    publish(device, stays && !busy_ ? 0 : movable());
    if (stays && said_ != why) {
      log::warning("this program's GPU memory stays where it is, although it is asked for: " + why);
    }
    said_ = stays ? why : "";
    return why.empty();
  } catch (const std::exception&) {  // no memory for a message
  }
  return false;
}

std::string Pager::move_away(Device& device, std::uint64_t least) {
  busy_ = false;
  if (std::string why = why_not(device); !why.empty()) return why;
  note();
  if (parking_ == nullptr || movable() == 0) return kHasNone;
  const std::uint64_t bytes = std::min(std::max(least, memory::Pool::kChunkBytes), movable());
  // Whole chunks, the last of which may be larger than the rest.
  const std::uint64_t room = std::min(bytes + memory::Pool::kChunkBytes, movable());
  if (std::string why = pin_in_turn(device, room); !why.empty()) return why;
  if (parking_->bytes() == 0) {
    std::string why = stop_program();
    busy_ = !why.empty();
    if (busy_) return why;
    note();
    if (movable() == 0) {  // it has freed all since
      driver::barrier().open();
      return kHasNone;
    }
  }
  const std::int64_t begin = now_ns();
  const std::uint64_t moved = parking_->move_out(bytes, piece(device));
  if (parking_->bytes() == 0) driver::barrier().open();
  if (moved == 0)
    return "no chunk of it fits into the host memory of the setting park, or the driver refuses to move it";
  log::info("parked " + rate_text(moved, now_ns() - begin));
  return "";
}

// Empty: so much more can go.
std::string Pager::pin(std::uint64_t more) {
  const std::uint64_t lacks = parking_->lacks(more);
  const std::uint64_t available = room_on_host();
  if (lacks > available - available / kHostPart) {
    return "it needs " + size_text(lacks) + " of the host's memory, and " + size_text(available) +
           " are available, of which a sixteenth stays (MemAvailable, the container's limit)";
  }
  const driver::RelaxedCapture relaxed;
  if (parking_->make_room(more)) return "";
  return "the driver does not pin " + size_text(lacks) + " of the host's memory for it (RLIMIT_MEMLOCK)";
}

// The same. Those for whose turn this is see that it takes time, but not again and again where it fails.
std::string Pager::pin_in_turn(Device& device, std::uint64_t more) {
  if (pin_failed_ || parking_->lacks(more) == 0 || device.table().lost()) return pin(more);
  std::atomic<std::int64_t>& since = device.table().memory(device.slot(Class::kBestEffort)).lacks_since_ns;
  std::int64_t before = schedule::kStopsNs;
  const bool tells = since.compare_exchange_strong(before, schedule::kPinsNs);
  std::string why = pin(more);
  pin_failed_ = !why.empty();
  if (tells && !device.table().lost()) since.store(schedule::kStopsNs, std::memory_order_release);
  return why;
}

// A segment, before it is needed.
void Pager::pin_ahead() {
  if (!pins_ahead_ || parking_ == nullptr || parking_->lacks(movable()) == 0) return;
  const std::string why = pin(parking_->pinned() - parking_->bytes() + memory::Arena::kSegmentBytes);
  pins_ahead_ = why.empty();
  if (!pins_ahead_) log::warning("no more of the host's memory is pinned ahead for this program's: " + why);
}

// Empty: no work of the process is on the GPU, and none comes.
std::string Pager::stop_program() {
  driver::Barrier& barrier = driver::barrier();
  if (!barrier.close(kInsideNs)) return "a CUDA call of it has not returned";
  bool idle = false;
  if (!hot().may_capture()) {  // begun since
    const driver::RelaxedCapture relaxed;
    const driver::CurrentContext here(pageable_.pool_made()->context());
    idle = here.ok() && table().cuCtxSynchronize() == CUDA_SUCCESS;
  }
  if (idle && barrier.shut()) return "";
  barrier.open();
  return "its work on the GPU has not ended";
}

// What the giver's looks at the pool have found.
void Pager::note() noexcept {
  memory::Pool* const pool = pageable_.pool_made();
  if (parking_ == nullptr && pool != nullptr) parking_ = new (std::nothrow) memory::Parking(*pool, most_.load());
  const std::optional<memory::Statistics> seen = pool != nullptr ? pool->look() : std::nullopt;
  if (parking_ == nullptr || !seen) return;
  away_.store(parking_->bytes(), std::memory_order_relaxed);
  const std::uint64_t all = std::min(seen->reserved, most_.load());
  movable_.store(all - std::min(all, parking_->bytes()), std::memory_order_relaxed);
}

// For this process's threads, and for clients that ask.
void Pager::publish(Device& device, std::uint64_t movable) noexcept {
  movable_.store(movable, std::memory_order_relaxed);
  if (device.table().lost()) return;
  device.table().memory(device.slot(Class::kBestEffort)).movable_bytes.store(movable, std::memory_order_release);
}

// On the GPU, for all that is away.
bool Pager::has_room() noexcept {
  const driver::CurrentContext here(pageable_.pool_made()->context());
  return here.ok() && free_memory() >= parking_->bytes();
}

bool Pager::rests() const noexcept { return now_ns() - refused_ns_ < kRefusedNs; }

void Pager::say_movable(Device& device) noexcept {
  if (movable() != 0 || away() != 0 || !driver::barrier().armed() || pageable_.pool_made() == nullptr ||
      !hot().scheduling.load(std::memory_order_relaxed))
    return;
  const std::unique_lock held(moving_, std::try_to_lock);
  if (!held.owns_lock() || rests()) return;  // the giver looks
  try {
    if (!why_not(device).empty()) return;
  } catch (const std::exception&) {
    return;
  }
  note();
  publish(device, movable());
}

void Pager::tend(Device& device, bool asked) noexcept {
  if (!driver::barrier().armed()) return;  // nothing can move
  const bool may_try = !rests();
  bool can = false;
  {
    const std::lock_guard held(moving_);
    note();
    try {
      can = (may_try || busy_) && hot().scheduling.load() && why_not(device).empty();
      if (can && may_try) pin_ahead();
    } catch (const std::exception&) {
    }
    publish(device, can ? movable() : 0);
  }
  if (wanted_away_.load() && can && may_try && movable() > 0) park(device, UINT64_MAX);
  const bool waits = has_turns() ? !follow_turns(device, asked) : asked;
  if (away() != 0 && !wanted_away_.load()) move_back(device, waits);
}

void Pager::move_back(Device& device, bool waits) noexcept {
  const std::lock_guard held(moving_);
  const std::int64_t now = now_ns();
  if (waits || parking_->bytes() == 0 || !has_room()) full_ns_ = now;
  if (now - full_ns_ < kCalmNs) return;
  const std::uint64_t moved = parking_->bytes();
  // A client whose allocation fails from here on asks for it again, or waits until this one's turn is over.
  publish(device, movable() + moved);
  begin_turn();
  returns_ = true;
  publish_turn(device);
  const bool is_back = parking_->move_in(piece(device));
  returns_ = false;
  if (is_back) {
    pageable_.carry_out_frees();
    driver::barrier().open();
    note();
    turn_until_ns_ = std::max(turn_until_ns_, now_ns() + turn_ns_.load());
    try {
      log::info("brought back " + rate_text(moved, now_ns() - now));
    } catch (const std::exception&) {
    }
  } else {
    full_ns_ = now_ns() + device.slot(Class::kBestEffort) * kNsPerMs;  // several programs do not try at once
    turn_until_ns_ = 1;                                                // and others are next
    if (since_ns_ != 0) since_ns_ = now_ns();
    publish(device, movable() - moved);
  }
  publish_turn(device);
}

// ---- turns

struct Pager::Seen {
  std::array<schedule::MemoryClient, arbiter::kSlotCount> clients{};
  schedule::MemoryView view;
};

bool Pager::takes_turns(Device& device) const noexcept {
  return has_turns() && driver::barrier().armed() && pageable_.pool_made() != nullptr && !device.table().lost() &&
         hot().scheduling.load() && !device.registered(Class::kLatency) && device.slot(Class::kBestEffort) >= 0;
}

void Pager::join_turns(Device& device) noexcept {
  if (!takes_turns(device)) return;
  std::int64_t none = 0;
  device.table().memory(device.slot(Class::kBestEffort)).turn_until_ns.compare_exchange_strong(none, 1);
}

void Pager::see(Device& device, bool asked, Seen& seen) noexcept {
  arbiter::Table& clients = device.table();
  const std::int64_t now = now_ns();
  for (std::uint64_t rest = clients.layout().best_effort.load(std::memory_order_acquire); rest != 0; rest &= rest - 1) {
    const int slot = std::countr_zero(rest);
    const arbiter::SlotMemory& words = clients.memory(slot);
    schedule::MemoryClient& client = seen.clients[static_cast<std::size_t>(slot)];
    client.turn_until_ns = words.turn_until_ns.load(std::memory_order_acquire);
    client.takes_turns =
        client.turn_until_ns != 0 && schedule::is_fresh(clients.slot(slot).heartbeat_ns.load(), now, kStoppedNs);
    client.lacks = words.lacks_bytes.load(std::memory_order_acquire);
    client.since_ns = words.lacks_since_ns.load(std::memory_order_acquire);
    client.movable = words.movable_bytes.load(std::memory_order_acquire);
  }
  seen.view = {seen.clients, 0, now, asked};
  if (std::ranges::none_of(seen.clients, [](const auto& client) { return client.lacks != 0; })) return;
  const driver::CurrentContext here(pageable_.pool_made()->context());
  if (here.ok()) seen.view.free = free_memory();
}

void Pager::begin_turn() noexcept {
  if (const std::int64_t now = now_ns(); turn_until_ns_ <= now) turn_until_ns_ = now + turn_ns_.load();
}

void Pager::publish_turn(Device& device) noexcept {
  if (served_.exchange(false)) {
    begin_turn();
    since_ns_ = 0;
  }
  const bool works = since_ns_ != 0 || wanted_.load() != 0 || driver::barrier().waited_for() || device.holds_launches();
  const std::uint64_t lacks = works && !wanted_away_.load() ? missing() : 0;
  if (lacks == 0) since_ns_ = 0;
  if (lacks != 0 && since_ns_ == 0) since_ns_ = now_ns();
  if (device.table().lost()) return;
  arbiter::SlotMemory& words = device.table().memory(device.slot(Class::kBestEffort));
  const bool takes = returns_ || (takes_.load() && away() == 0);
  words.lacks_since_ns.store(takes ? schedule::kTakesNs : since_ns_, std::memory_order_release);
  words.turn_until_ns.store(takes_turns(device) ? turn_until_ns_ : 0, std::memory_order_release);
  const std::uint64_t before = words.lacks_bytes.exchange(lacks, std::memory_order_release);
  if (lacks != before) device.table().wake_for_memory();
}

// Moves memory away where it is another client's turn. False: this client's memory may not come back.
bool Pager::follow_turns(Device& device, bool asked) noexcept {
  publish_turn(device);
  if (!takes_turns(device)) return !asked;
  const int slot = device.slot(Class::kBestEffort);
  Seen seen;
  see(device, asked, seen);
  if (schedule::has_memory(seen.view, slot)) {
    begin_turn();
    publish_turn(device);
    return true;
  }
  if (const std::uint64_t bytes = schedule::gives_memory(seen.view, slot); bytes != 0 && !rests()) {
    // While it moves, its words are not true: others do not give for it.
    device.table().memory(slot).lacks_since_ns.store(schedule::kStopsNs, std::memory_order_release);
    park(device, bytes);
    publish_turn(device);
  }
  return !asked && schedule::next_for_memory(seen.view) < 0;
}

MemoryTurn::MemoryTurn(int device, std::uint64_t bytes) noexcept {
  Device* const known = engine().known_device(device);
  Pager& pager = memory().pager;
  if (known == nullptr || !pager.has_turns() || !hot().scheduling.load(std::memory_order_relaxed)) return;
  // One that has launched nothing yet becomes a client here.
  if (!engine().prepare(*known, Class::kBestEffort, this_thread()) || !pager.takes_turns(*known)) return;
  try {
    if (!pager.why_not(*known).empty()) return;
  } catch (const std::exception&) {
    return;
  }
  std::size_t free = 0;
  std::size_t all = 0;
  if (table().cuMemGetInfo(&free, &all) != CUDA_SUCCESS || bytes > all) return;
  Pager::Seen seen;
  pager.see(*known, false, seen);
  seen.clients[static_cast<std::size_t>(known->slot(Class::kBestEffort))].takes_turns = false;
  if (std::ranges::none_of(seen.clients, [](const auto& client) { return client.takes_turns; })) return;
  waits_ = std::unique_lock(pager.waits_);
  device_ = known;
  free_ = free;
  want(bytes);
}

MemoryTurn::~MemoryTurn() {
  if (device_ == nullptr) return;
  memory().pager.wanted_.store(0);
  memory().pager.takes_.store(false);
  device_->table().wake_for_memory();
}

void MemoryTurn::want(std::uint64_t bytes) noexcept {
  memory().pager.wanted_.fetch_add(bytes);
  device_->table().wake_for_memory();
}

bool MemoryTurn::next() noexcept {
  if (device_ == nullptr) return false;
  if (tried_) want(schedule::kSpareBytes);  // the driver does not give all free memory
  tried_ = true;
  Pager& pager = memory().pager;
  pager.takes_.store(false);
  std::int64_t looked_ns = now_ns();
  while (pager.takes_turns(*device_)) {
    arbiter::Table& clients = device_->table();
    const int slot = device_->slot(Class::kBestEffort);
    const std::uint32_t sequence = clients.layout().memory.sequence.load(std::memory_order_acquire);
    Pager::Seen seen;
    pager.see(*device_, Memory::asked(clients), seen);
    schedule::MemoryClient& own = seen.clients[static_cast<std::size_t>(slot)];
    const std::uint64_t away = pager.away();
    const bool told = own.takes_turns && own.lacks >= pager.missing();
    if (told && away == 0 && schedule::has_memory(seen.view, slot)) {
      pager.takes_.store(true);
      pager.served_.store(true);
      clients.memory(slot).lacks_since_ns.store(schedule::kTakesNs, std::memory_order_release);
      return true;
    }
    own.lacks = away + pager.wanted_.load();
    const bool moved = seen.view.free > free_ && schedule::may_have_memory(seen.view, slot);
    const bool comes_back = away != 0 && own.turn_until_ns > seen.view.now_ns;
    if (told && (moved || schedule::waits_for_turn(seen.view, slot))) {
      hopeless_ns_ = 0;
      free_ = seen.view.free;
    } else if (!comes_back && !pager.wanted_away_.load()) {
      hopeless_ns_ += std::min(seen.view.now_ns - looked_ns, kLongestLookNs);  // a stopped process has not looked
    }
    looked_ns = seen.view.now_ns;
    if (hopeless_ns_ > memory().give_back_ns() + 2 * kRefusedNs) return false;
    clients.sleep_for_memory(sequence, kTurnLookNs);
  }
  return false;
}

bool Pager::drop() noexcept {
  const std::lock_guard held(moving_);
  if (parking_ == nullptr || parking_->bytes() == 0) return false;
  parking_->drop();
  driver::barrier().pin();  // the pool still counts what went with the context
  away_.store(0, std::memory_order_relaxed);
  movable_.store(0, std::memory_order_relaxed);
  driver::barrier().open();
  return true;
}

void Pager::reset_in_child() noexcept {
  Pageable& pageable = pageable_;
  new (this) Pager(pageable);
}

}  // namespace cudasched::runtime
