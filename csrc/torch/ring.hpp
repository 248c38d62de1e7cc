// A bounded queue of small records between any number of writers and readers, without locks (each cell has a turn of
// its own). Where the queue is full, a writer counts the record as lost and goes on, because it holds the allocator's
// mutex. Any thread may call everything.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace cudasched::torch_memory {

template <typename Record>
class Ring {
  static_assert(std::is_trivially_copyable_v<Record>);

 public:
  // `capacity` is a power of two.
  explicit Ring(std::size_t capacity) : mask_(capacity - 1), cells_(std::make_unique<Cell[]>(capacity)) {
    for (std::size_t i = 0; i < capacity; ++i) cells_[i].turn.store(i, std::memory_order_relaxed);
  }

  bool push(const Record& record) noexcept {
    std::size_t place = head_.load(std::memory_order_relaxed);
    while (true) {
      Cell& cell = cells_[place & mask_];
      const auto ahead = static_cast<std::ptrdiff_t>(cell.turn.load(std::memory_order_acquire) - place);
      if (ahead == 0) {
        if (!head_.compare_exchange_weak(place, place + 1, std::memory_order_relaxed)) continue;
        cell.record = record;
        cell.turn.store(place + 1, std::memory_order_release);
        return true;
      }
      if (ahead < 0) {
        lost_.fetch_add(1, std::memory_order_relaxed);
        return false;
      }
      place = head_.load(std::memory_order_relaxed);
    }
  }

  bool pop(Record& record) noexcept {
    std::size_t place = tail_.load(std::memory_order_relaxed);
    while (true) {
      Cell& cell = cells_[place & mask_];
      const auto ahead = static_cast<std::ptrdiff_t>(cell.turn.load(std::memory_order_acquire) - (place + 1));
      if (ahead == 0) {
        if (!tail_.compare_exchange_weak(place, place + 1, std::memory_order_relaxed)) continue;
        record = cell.record;
        cell.turn.store(place + mask_ + 1, std::memory_order_release);
        return true;
      }
      if (ahead < 0) return false;
      place = tail_.load(std::memory_order_relaxed);
    }
  }

  std::uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed); }

 private:
  struct Cell {
    std::atomic<std::size_t> turn;
    Record record;
  };

  const std::size_t mask_;
  const std::unique_ptr<Cell[]> cells_;
  alignas(64) std::atomic<std::size_t> head_{0};
  alignas(64) std::atomic<std::size_t> tail_{0};
  std::atomic<std::uint64_t> lost_{0};
};

}  // namespace cudasched::torch_memory
