#include "runtime/memory/pager.hpp"

#include <algorithm>
#include <exception>
#include <new>
#include <optional>

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
    if (why.empty()) {
      refused_ns_ = 0;
      said_.clear();
      return true;
    }
    movable_.store(0, std::memory_order_relaxed);
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
  const std::uint64_t lacks = parking_->lacks(room);
  const std::uint64_t available = room_on_host();
  if (lacks > available - available / kHostPart || !parking_->make_room(room)) {
    return size_text(lacks) +
           " of the host's memory cannot be had and pinned for it (free memory, RLIMIT_MEMLOCK, the "
           "container's limit)";
  }
  if (parking_->bytes() == 0) {
    if (std::string why = stop_program(); !why.empty()) return why;
  }
  const std::int64_t begin = now_ns();
  const std::uint64_t moved = parking_->move_out(bytes);
  if (parking_->bytes() == 0) driver::barrier().open();
  if (moved == 0) return "the driver refuses to copy or unmap it";
  log::info("parked " + size_text(moved) + " in " + std::to_string((now_ns() - begin) / kNsPerMs) + " ms");
  return "";
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
  if (parking_ == nullptr && pool != nullptr) parking_ = new (std::nothrow) memory::Parking(*pool);
  const std::optional<memory::Statistics> seen = pool != nullptr ? pool->look() : std::nullopt;
  if (parking_ == nullptr || !seen) return;
  away_.store(parking_->bytes(), std::memory_order_relaxed);
  movable_.store(seen->reserved - std::min(seen->reserved, parking_->bytes()), std::memory_order_relaxed);
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
  const std::int64_t now = now_ns();
  const bool may_try = now - refused_ns_ >= kRefusedNs;
  bool can = false;
  {
    const std::lock_guard held(moving_);
    note();
    try {
      can = may_try && why_not(device).empty();
    } catch (const std::exception&) {
    }
    if (!can) movable_.store(0, std::memory_order_relaxed);
  }
  if (wanted_away_.load() && can && movable() > 0) park(device, UINT64_MAX);
  if (away() == 0 || wanted_away_.load()) return;
  const std::lock_guard held(moving_);
  if (asked || parking_->bytes() == 0 || !has_room()) full_ns_ = now;
  if (now - full_ns_ < kCalmNs) return;
  if (parking_->move_in()) {
    driver::barrier().open();
    note();
  } else {
    full_ns_ = now_ns() + device.slot(Class::kBestEffort) * kNsPerMs;  // several programs do not try at once
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
