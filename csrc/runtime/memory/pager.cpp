#include "runtime/memory/pager.hpp"

#include <algorithm>
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
#include "runtime/hot.hpp"
#include "runtime/memory/host_memory.hpp"
#include "runtime/memory/pageable.hpp"

namespace cudasched::runtime {
namespace {

using driver::table;

constexpr std::int64_t kInsideNs = kNsPerSecond;   // a call may take so long that was under way
constexpr std::int64_t kRefusedNs = kNsPerSecond;  // after a move that failed
constexpr std::int64_t kCalmNs = 200 * kNsPerMs;   // the GPU has had room
constexpr std::uint64_t kHostPart = 16;            // of the host's available memory, which stays

std::string rate_text(std::uint64_t bytes, std::int64_t ns) {
  return std::to_string(bytes >> 20) + " MiB in " + std::to_string(ns / kNsPerUs) + " us";
}

}  // namespace

// Empty: memory can move. The caller holds moving_, or is the giver.
std::string Pager::why_not(const Device& device) const {
  if (!driver::barrier().armed()) return "the setting park is off";
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
    note();
    refused_ns_ = now_ns();
    full_ns_ = refused_ns_;
    publish(device, why.empty() ? movable() : 0);
    if (why.empty()) {
      refused_ns_ = 0;
      said_.clear();
      return true;
    }
    if (said_ != why) log::warning("this program's GPU memory stays where it is, although it is asked for: " + why);
    said_ = why;
  } catch (const std::exception&) {  // no memory for a message
  }
  return false;
}

std::string Pager::move_away(Device& device, std::uint64_t least) {
  if (std::string why = why_not(device); !why.empty()) return why;
  note();
  if (parking_ == nullptr || movable() == 0) return "it holds no pageable memory";
  const std::uint64_t bytes = std::min(std::max(least, memory::Pool::kChunkBytes), movable());
  // Whole chunks, the last of which may be larger than the rest.
  const std::uint64_t room = std::min(bytes + memory::Pool::kChunkBytes, movable());
  if (std::string why = pin(room); !why.empty()) return why;
  if (parking_->bytes() == 0) {
    if (std::string why = stop_program(); !why.empty()) return why;
  }
  const std::int64_t begin = now_ns();
  const std::uint64_t moved = parking_->move_out(bytes);
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
  std::size_t free = 0;
  std::size_t all = 0;
  return here.ok() && table().cuMemGetInfo(&free, &all) == CUDA_SUCCESS && free >= parking_->bytes();
}

void Pager::tend(Device& device, bool asked) noexcept {
  if (!driver::barrier().armed()) return;  // nothing can move
  const bool may_try = now_ns() - refused_ns_ >= kRefusedNs;
  bool can = false;
  {
    const std::lock_guard held(moving_);
    note();
    try {
      can = may_try && why_not(device).empty();
      if (can) pin_ahead();
    } catch (const std::exception&) {
    }
    publish(device, can ? movable() : 0);
  }
  if (wanted_away_.load() && can && movable() > 0) park(device, UINT64_MAX);
  if (away() != 0 && !wanted_away_.load()) move_back(device, asked);
}

void Pager::move_back(Device& device, bool asked) noexcept {
  const std::lock_guard held(moving_);
  const std::int64_t now = now_ns();
  if (asked || parking_->bytes() == 0 || !has_room()) full_ns_ = now;
  if (now - full_ns_ < kCalmNs) return;
  const std::uint64_t moved = parking_->bytes();
  // A client whose allocation fails from here on asks for it again.
  publish(device, movable() + moved);
  if (parking_->move_in()) {
    driver::barrier().open();
    note();
    try {
      log::info("brought back " + rate_text(moved, now_ns() - now));
    } catch (const std::exception&) {
    }
  } else {
    full_ns_ = now_ns() + device.slot(Class::kBestEffort) * kNsPerMs;  // several programs do not try at once
    publish(device, movable() - moved);
  }
}

bool Pager::drop() noexcept {
  const std::lock_guard held(moving_);
  if (parking_ == nullptr || parking_->bytes() == 0) return false;
  parking_->drop();
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
