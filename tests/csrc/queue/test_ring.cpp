#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/spin_lock.hpp"
#include "queue/ring.hpp"

namespace cudasched::queue {
namespace {

constexpr std::int64_t kForever = 60 * kNsPerSecond;

Position push(Ring& ring, std::uint64_t value, std::size_t bytes, bool for_launch = false) {
  std::byte* data = nullptr;
  Operation* operation = ring.reserve(bytes, data, for_launch);
  if (operation == nullptr) return 0;
  operation->thread = static_cast<unsigned>(value);
  operation->copy = {reinterpret_cast<CUdeviceptr>(data), value, bytes, Operation::Direction::kAny};
  std::memset(data, static_cast<int>(value & 0xff), bytes);
  return ring.publish();
}

// What lies in the arena is what was put there.
void expect_intact(const Operation& operation) {
  const auto* data = reinterpret_cast<const unsigned char*>(operation.copy.to);
  const auto wanted = static_cast<unsigned char>(operation.copy.from);
  ASSERT_TRUE(std::all_of(data, data + operation.copy.bytes, [&](unsigned char byte) { return byte == wanted; }));
}

TEST(Ring, KeepsOrderAndCountsPositionsFromOne) {
  Ring ring(8, 1024);
  ASSERT_TRUE(ring.usable());
  EXPECT_TRUE(ring.empty());
  EXPECT_EQ(ring.front(), nullptr);
  EXPECT_EQ(push(ring, 5, 0), 1U);
  EXPECT_EQ(push(ring, 6, 0), 2U);
  EXPECT_EQ(ring.front()->thread, 5U);
  ring.pass();
  EXPECT_EQ(ring.front()->thread, 6U);
  EXPECT_EQ(ring.passed(), 1U);
  ring.pass();
  EXPECT_TRUE(ring.empty());
  EXPECT_TRUE(ring.await(2, 0));
  EXPECT_FALSE(ring.await(3, 0));
}

TEST(Ring, IsFullBySlotsAndByBytes) {
  Ring ring(8, 1024);
  for (int i = 0; i < 7; ++i) ASSERT_NE(push(ring, 1, 0), 0U);
  EXPECT_EQ(push(ring, 1, 0), 0U);
  EXPECT_EQ(ring.position_with_room(), 1U);
  ring.pass();
  EXPECT_NE(push(ring, 1, 0), 0U);

  Ring small(64, 1024);
  for (int i = 0; i < 4; ++i) ASSERT_NE(push(small, 1, 256), 0U);
  EXPECT_EQ(push(small, 1, 1), 0U);
  EXPECT_NE(push(small, 1, 0), 0U);
  small.pass();
  EXPECT_NE(push(small, 1, 256), 0U);
}

TEST(Ring, KeepsASixteenthFromLaunches) {
  Ring ring(32, 4096);
  for (int i = 0; i < 29; ++i) ASSERT_NE(push(ring, 1, 0, /*for_launch=*/true), 0U);
  EXPECT_EQ(push(ring, 1, 0, /*for_launch=*/true), 0U);
  EXPECT_NE(push(ring, 1, 0), 0U);
  EXPECT_NE(push(ring, 1, 0), 0U);
  EXPECT_EQ(push(ring, 1, 0), 0U);

  Ring small(64, 1024);
  for (int i = 0; i < 3; ++i) ASSERT_NE(push(small, 1, 256, /*for_launch=*/true), 0U);
  EXPECT_EQ(push(small, 1, 256, /*for_launch=*/true), 0U);
  EXPECT_NE(push(small, 1, 192, /*for_launch=*/true), 0U);
  EXPECT_EQ(push(small, 1, 16, /*for_launch=*/true), 0U);
  EXPECT_NE(push(small, 1, 64), 0U);
}

// Sizes of all kinds over many rounds: no two that are queued overlap, and what fits an empty ring always finds room.
TEST(Ring, ArenaNeverOverlapsAndNeverSeizesUp) {
  Ring ring(16, 4096);
  std::mt19937 random(11);
  std::uint64_t pushed = 0;
  for (int step = 0; step < 300'000; ++step) {
    if (random() % 2 == 0) {
      const std::size_t bytes = random() % (ring.max_bytes() + 1);
      const bool empty = ring.empty();
      if (push(ring, pushed + 1, bytes) != 0) {
        ++pushed;
      } else {
        ASSERT_FALSE(empty);
      }
    } else if (const Operation* operation = ring.front()) {
      ASSERT_EQ(operation->copy.from, ring.passed() + 1);
      expect_intact(*operation);
      ring.pass();
    }
  }
  EXPECT_GT(pushed, 50'000U);
}

// Many threads push, one consumes, others wait: each thread's own order holds, nothing is lost, everyone wakes.
TEST(Ring, ManyPushersManyWaiters) {
  constexpr unsigned kThreads = 4;
  constexpr std::uint64_t kEach = 20'000;
  Ring ring(64, 1U << 14);
  SpinLock lock;
  std::atomic<bool> no_stop{false};

  std::thread consumer([&] {
    std::vector<std::uint64_t> next(kThreads, 0);
    for (std::uint64_t passed = 0; passed < kThreads * kEach;) {
      if (const Operation* operation = ring.front()) {
        const unsigned thread = operation->thread;
        ASSERT_EQ(operation->copy.bytes, next[thread] % 100);
        ++next[thread];
        expect_intact(*operation);
        ring.pass();
        ++passed;
      } else {
        ring.await_work(kForever, no_stop);
      }
    }
  });
  std::vector<std::thread> pushers;
  for (unsigned thread = 0; thread < kThreads; ++thread) {
    pushers.emplace_back([&, thread] {
      for (std::uint64_t i = 0; i < kEach; ++i) {
        Position position = 0;
        while (position == 0) {
          Position room = 0;
          {
            const std::scoped_lock held(lock);
            std::byte* data = nullptr;
            if (Operation* operation = ring.reserve(i % 100, data, false)) {
              operation->thread = thread;
              operation->copy = {reinterpret_cast<CUdeviceptr>(data), i, i % 100, Operation::Direction::kAny};
              std::memset(data, static_cast<int>(i & 0xff), i % 100);
              position = ring.publish();
            } else {
              room = ring.position_with_room();
            }
          }
          if (position == 0) {
            ASSERT_TRUE(ring.await(room, kForever));
          }
        }
        if (i % 1000 == thread) {
          ASSERT_TRUE(ring.await(position, kForever));
          ASSERT_GE(ring.passed(), position);
        }
      }
    });
  }
  for (std::thread& pusher : pushers) pusher.join();
  EXPECT_TRUE(ring.await(kThreads * kEach, kForever));
  consumer.join();
  EXPECT_TRUE(ring.empty());
}

TEST(Ring, AnInterruptedConsumerWakes) {
  Ring ring(8, 1024);
  std::atomic<bool> interrupted{false};
  std::thread consumer([&] {
    while (!interrupted) ring.await_work(kForever, interrupted);
  });
  interrupted = true;
  ring.notify();
  consumer.join();
}

// A push leaves a consumer that naps alone; a thread that waits for what it pushed wakes it. Every time: the nap has no
// other end here.
TEST(Ring, AThreadThatWaitsWakesAConsumerThatNaps) {
  constexpr std::uint64_t kRounds = 5'000;
  Ring ring(8, 1024);
  std::atomic<bool> no_stop{false};
  std::thread consumer([&] {
    for (std::uint64_t passed = 0; passed < 2 * kRounds;) {
      if (ring.front() != nullptr) {
        ring.pass();
        ++passed;
      } else {
        ring.nap(kForever, no_stop);
      }
    }
  });
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    push(ring, 1, 8);
    const Position last = push(ring, 1, 8);
    ASSERT_TRUE(ring.await(last, kForever));
  }
  consumer.join();
}

TEST(Ring, KnowsWhetherOtherStreamsAreQueuedBehindTheOldestOperation) {
  Ring ring(8, 1024);
  const auto push_to = [&](std::uintptr_t stream) {
    std::byte* data = nullptr;
    Operation* const operation = ring.reserve(8, data, false);
    operation->stream = reinterpret_cast<CUstream>(stream);
    ring.publish();
  };
  EXPECT_FALSE(ring.other_streams_behind());
  push_to(16);
  EXPECT_FALSE(ring.other_streams_behind());
  push_to(16);
  EXPECT_FALSE(ring.other_streams_behind());
  push_to(32);
  EXPECT_TRUE(ring.other_streams_behind());
  ring.pass();
  EXPECT_TRUE(ring.other_streams_behind());
  ring.pass();
  EXPECT_FALSE(ring.other_streams_behind());
}

TEST(Ring, AnAbandonedRingIsEmpty) {
  Ring ring(8, 1024);
  push(ring, 1, 8);
  ring.abandon();
  EXPECT_TRUE(ring.empty());
  EXPECT_TRUE(ring.await(1, 0));
}

}  // namespace
}  // namespace cudasched::queue
