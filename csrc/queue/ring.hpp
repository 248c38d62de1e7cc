// Operations in program order, with memory for copies of their parameters. Allocated once.
//
// Many threads push, one at a time. reserve() and publish() are called under the queue's lock; neither allocates nor
// calls the system, except to wake a sleeping consumer. One thread consumes: front(), pass() and await_work(). Any
// thread may ask for the ring's position and wait for one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "queue/operation.hpp"
#include "queue/order.hpp"

namespace cudasched::queue {

class Ring {
 public:
  static constexpr std::uint32_t kSlots = 4096;
  static constexpr std::uint32_t kArenaBytes = 1U << 20;

  // Both powers of two. Where there is no memory, the ring is not usable.
  explicit Ring(std::uint32_t slots = kSlots, std::uint32_t arena_bytes = kArenaBytes) noexcept;
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  bool usable() const noexcept { return memory_ != nullptr; }

  // The most that one operation can carry.
  std::size_t max_bytes() const noexcept { return arena_bytes_ / 4; }

  // The next operation's place, and `bytes` (at most max_bytes()) for its data, aligned for any type. Null where the
  // ring is full: wait for position_with_room() and ask again. Nothing is in the ring before publish(). For a launch
  // the ring is full when a sixteenth is left. Launches wait at the gate's pace, and other calls (records, copies, made
  // under locks at times) still find room.
  Operation* reserve(std::size_t bytes, std::byte*& data, bool for_launch) noexcept;
  Position publish() noexcept;
  Position position_with_room() const noexcept;

  // The oldest operation that is not passed, at passed() + 1, or null.
  const Operation* front() const noexcept;
  // The one behind front(), or null.
  const Operation* second() const noexcept;
  // One that is pushed and not passed. The consumer's.
  Operation& at(Position position) const noexcept { return slot(position).operation; }
  // Is an operation of another stream queued behind the oldest one? The consumer asks; the answer may take some
  // microseconds.
  bool other_streams_behind() const noexcept;
  // The oldest operation's driver call has returned.
  void pass() noexcept;
  // Sleeps until there is work, or notify() is called after `interrupted` was set, at most for `longest_ns`.
  void await_work(std::int64_t longest_ns, const std::atomic<bool>& interrupted) noexcept;
  // The same, but a push does not end the nap: only notify() does, and a thread that waits for a position. So the
  // pushing thread never pays for waking the consumer, and its operation waits for `longest_ns` at most.
  void nap(std::int64_t longest_ns, const std::atomic<bool>& interrupted) noexcept;
  void notify() noexcept;
  // In a forked child: the ring is empty.
  void abandon() noexcept { passed_.store(pushed(), std::memory_order_release); }

  Position pushed() const noexcept { return pushed_.load(std::memory_order_acquire); }
  Position passed() const noexcept { return passed_.load(std::memory_order_acquire); }
  bool empty() const noexcept { return passed() == pushed(); }

  // Waits until `position` is passed, at most for `longest_ns`. True: passed.
  bool await(Position position, std::int64_t longest_ns) noexcept;

 private:
  static constexpr std::int64_t kSpinNs = 20'000;  // before a waiter sleeps
  static constexpr std::uint32_t kSpare = 16;      // one in so many, of slots and bytes, is kept from launches
  static constexpr Position kNoSleeper = ~Position{0};

  struct Slot {
    Operation operation;
    std::uint64_t arena_end = 0;  // the arena before this is free once this operation is passed
  };
  static_assert(sizeof(Slot) == 128);  // two cache lines: a third costs a push 3 ns

  Slot& slot(Position position) const noexcept { return slots_[(position - 1) & (slot_count_ - 1)]; }
  enum Consumer : std::uint32_t { kAwake, kAsleep, kNapping };

  void sleep(Consumer how, std::int64_t longest_ns, const std::atomic<bool>& interrupted) noexcept;
  void wake_waiters() noexcept;

  void* memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  Slot* slots_ = nullptr;
  std::byte* arena_ = nullptr;
  std::uint32_t slot_count_;
  std::uint32_t arena_bytes_;

  // Producers.
  alignas(64) std::atomic<Position> pushed_{0};
  std::uint64_t arena_used_ = 0;  // bytes ever handed out, with gaps
  std::atomic<std::uint32_t> consumer_{kAwake};

  // The consumer.
  alignas(64) std::atomic<Position> passed_{0};

  // Waiters.
  alignas(64) std::atomic<Position> wanted_{kNoSleeper};  // the least position that a sleeper wants
  std::atomic<std::uint32_t> wakes_{0};
};

}  // namespace cudasched::queue
