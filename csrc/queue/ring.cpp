#include "queue/ring.hpp"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>

#include "base/clock.hpp"
#include "base/futex.hpp"
#include "base/processor.hpp"

namespace cudasched::queue {
namespace {

constexpr std::uint64_t kAlignment = 16;

}  // namespace

Ring::Ring(std::uint32_t slots, std::uint32_t arena_bytes) noexcept : slot_count_(slots), arena_bytes_(arena_bytes) {
  memory_bytes_ = std::size_t{arena_bytes} + std::size_t{slots} * sizeof(Slot);
  void* const memory = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return;
  memory_ = memory;
  arena_ = static_cast<std::byte*>(memory);
  slots_ = reinterpret_cast<Slot*>(arena_ + arena_bytes);
  std::uninitialized_default_construct_n(slots_, slots);
}

Ring::~Ring() {
  if (memory_ != nullptr) munmap(memory_, memory_bytes_);
}

Operation* Ring::reserve(std::size_t bytes, std::byte*& data, bool for_launch) noexcept {
  const Position pushed = pushed_.load(std::memory_order_relaxed);
  const Position passed = this->passed();
  const std::uint32_t spare_slots = for_launch ? slot_count_ / kSpare : 0;
  const std::uint32_t spare_bytes = for_launch ? arena_bytes_ / kSpare : 0;
  // The slot of `passed` is still read below.
  if (pushed - passed >= slot_count_ - 1 - spare_slots) return nullptr;
  const std::uint64_t arena_free_from = passed == 0 ? 0 : slot(passed).arena_end;
  std::uint64_t begin = (arena_used_ + kAlignment - 1) & ~(kAlignment - 1);
  // In one piece: data that does not fit before the arena's end lies at its beginning.
  const std::uint64_t room_to_end = arena_bytes_ - (begin & (arena_bytes_ - 1));
  if (bytes > room_to_end) begin += room_to_end;
  if (begin + bytes - arena_free_from > arena_bytes_ - spare_bytes) return nullptr;
  Slot& place = slot(pushed + 1);
  place.arena_end = begin + bytes;
  data = arena_ + (begin & (arena_bytes_ - 1));
  return &place.operation;
}

Position Ring::publish() noexcept {
  const Position position = pushed_.load(std::memory_order_relaxed) + 1;
  arena_used_ = slot(position).arena_end;
  // With the next load and their twins in await_work(): either the consumer sees this operation or we see it asleep.
  pushed_.store(position, std::memory_order_seq_cst);
  if (consumer_.load(std::memory_order_seq_cst) == kAsleep) notify();
  return position;
}

Position Ring::position_with_room() const noexcept {
  // An eighth of the queued operations at once, so that a program that is far ahead sleeps seldom.
  const Position passed = this->passed();
  const Position pushed = this->pushed();
  return passed >= pushed ? passed : passed + std::max<Position>((pushed - passed) / 8, 1);
}

const Operation* Ring::front() const noexcept {
  const Position passed = passed_.load(std::memory_order_relaxed);
  return pushed() == passed ? nullptr : &slot(passed + 1).operation;
}

const Operation* Ring::second() const noexcept {
  const Position passed = passed_.load(std::memory_order_relaxed);
  return pushed() < passed + 2 ? nullptr : &slot(passed + 2).operation;
}

bool Ring::other_streams_behind() const noexcept {
  const Operation* const head = front();
  if (head == nullptr) return false;
  const Position pushed = this->pushed();
  for (Position position = passed_.load(std::memory_order_relaxed) + 2; position <= pushed; ++position) {
    const Operation& operation = slot(position).operation;
    if (operation.kind != Operation::Kind::kChange && operation.stream != head->stream) return true;
  }
  return false;
}

void Ring::pass() noexcept {
  const Position passed = passed_.load(std::memory_order_relaxed) + 1;
  passed_.store(passed, std::memory_order_seq_cst);  // with the next load and their twins in await()
  if (wanted_.load(std::memory_order_seq_cst) <= passed) wake_waiters();
}

void Ring::wake_waiters() noexcept {
  // Threads that wait for more register again.
  wanted_.store(kNoSleeper, std::memory_order_seq_cst);
  wakes_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(wakes_);
}

void Ring::await_work(std::int64_t longest_ns, const std::atomic<bool>& interrupted) noexcept {
  sleep(kAsleep, longest_ns, interrupted);
}

void Ring::nap(std::int64_t longest_ns, const std::atomic<bool>& interrupted) noexcept {
  sleep(kNapping, longest_ns, interrupted);
}

void Ring::sleep(Consumer how, std::int64_t longest_ns, const std::atomic<bool>& interrupted) noexcept {
  consumer_.store(how, std::memory_order_seq_cst);
  if (pushed_.load(std::memory_order_seq_cst) == passed_.load(std::memory_order_relaxed) &&
      !interrupted.load(std::memory_order_seq_cst)) {
    futex_sleep(consumer_, how, longest_ns);
  }
  consumer_.store(kAwake, std::memory_order_relaxed);
}

void Ring::notify() noexcept {
  if (consumer_.exchange(kAwake, std::memory_order_seq_cst) != kAwake) futex_wake_all(consumer_);
}

bool Ring::await(Position position, std::int64_t longest_ns) noexcept {
  if (passed() >= position) return true;
  // A consumer that naps does not look by itself. One that is about to nap sees the pushed operation, and does not.
  if (consumer_.load(std::memory_order_seq_cst) == kNapping) notify();
  const std::int64_t begin = now_ns();
  for (std::int64_t now = begin; now - begin < std::min(kSpinNs, longest_ns); now = now_ns()) {
    for (int i = 0; i < 16; ++i) spin_pause();
    if (passed() >= position) return true;
  }
  while (true) {
    const std::uint32_t seen = wakes_.load(std::memory_order_seq_cst);
    Position wanted = wanted_.load(std::memory_order_seq_cst);
    while (position < wanted && !wanted_.compare_exchange_weak(wanted, position, std::memory_order_seq_cst)) {
    }
    if (passed_.load(std::memory_order_seq_cst) >= position) return true;
    const std::int64_t left = begin + longest_ns - now_ns();
    if (left <= 0) return false;
    futex_sleep(wakes_, seen, left);
    if (passed() >= position) return true;
  }
}

}  // namespace cudasched::queue
