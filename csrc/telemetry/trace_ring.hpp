// A bounded queue of trace records: any thread puts records in, one thread takes them out. Neither ever waits: where
// the queue is full, a record is dropped and counted.
//
// push() takes a compare-and-swap that no other thread contends for, as long as each thread has a ring of its own, and
// no system call, lock or allocation. Made in memory that was allocated before; never destroyed while a thread may
// push.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "telemetry/trace_record.hpp"

namespace cudasched::telemetry {

template <std::size_t kCells>
class alignas(64) TraceRing {
  static_assert((kCells & (kCells - 1)) == 0);

 public:
  TraceRing() noexcept {
    for (std::size_t i = 0; i < kCells; ++i) cells_[i].sequence.store(i, std::memory_order_relaxed);
  }
  TraceRing(const TraceRing&) = delete;
  TraceRing& operator=(const TraceRing&) = delete;

  // False where it is full.
  bool push(const TraceRecord& record) noexcept {
    std::uint64_t position = tail_.load(std::memory_order_relaxed);
    while (true) {
      Cell& cell = cells_[position & (kCells - 1)];
      const std::uint64_t sequence = cell.sequence.load(std::memory_order_acquire);
      if (sequence == position) {
        if (!tail_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) continue;
        cell.record = record;
        cell.sequence.store(position + 1, std::memory_order_release);
        return true;
      }
      if (sequence < position) {  // of the round before: not taken out yet
        dropped_.fetch_add(1, std::memory_order_relaxed);
        return false;
      }
      position = tail_.load(std::memory_order_relaxed);
    }
  }

  // Shows visit() at most `most` records, each thread's in order, and takes them out. Of one thread alone. Returns how
  // many.
  template <typename Visit>
  std::size_t drain(std::size_t most, Visit&& visit) {
    std::size_t taken = 0;
    for (; taken < most; ++taken) {
      Cell& cell = cells_[head_ & (kCells - 1)];
      if (cell.sequence.load(std::memory_order_acquire) != head_ + 1) break;
      visit(static_cast<const TraceRecord&>(cell.record));
      cell.sequence.store(head_ + kCells, std::memory_order_release);
      ++head_;
    }
    return taken;
  }

  std::uint64_t dropped() const noexcept { return dropped_.load(std::memory_order_relaxed); }

 private:
  // A cell is free for position p where its sequence is p, and holds that record where it is p + 1.
  struct Cell {
    std::atomic<std::uint64_t> sequence;
    TraceRecord record;
  };
  static_assert(sizeof(Cell) == 48);

  alignas(64) std::atomic<std::uint64_t> tail_{0};
  std::atomic<std::uint64_t> dropped_{0};
  alignas(64) std::uint64_t head_ = 0;
  alignas(64) std::array<Cell, kCells> cells_;
};

}  // namespace cudasched::telemetry
