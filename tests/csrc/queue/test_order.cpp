#include <gtest/gtest.h>

#include <map>
#include <random>

#include "queue/fixed_map.hpp"
#include "queue/order.hpp"

namespace cudasched::queue {
namespace {

constexpr std::uint64_t kA = 0x100, kB = 0x200, kC = 0x300, kLegacyStream = 1;
constexpr std::uint64_t kE = 0xe00, kF = 0xf00;

class OrderTest : public testing::Test {
 protected:
  Order order;
};

TEST_F(OrderTest, AStreamsPositionIsItsLastOperation) {
  order.stream_used(kA, StreamKind::kNonBlocking, 1);
  order.stream_used(kB, StreamKind::kNonBlocking, 2);
  order.stream_used(kA, StreamKind::kNonBlocking, 3);
  EXPECT_EQ(order.of_stream(kA, StreamKind::kNonBlocking), 3U);
  EXPECT_EQ(order.of_stream(kB, StreamKind::kNonBlocking), 2U);
  EXPECT_EQ(order.of_stream(kC, StreamKind::kNonBlocking), 0U);
  EXPECT_EQ(order.end(), 3U);
}

TEST_F(OrderTest, TheLegacyStreamWaitsForAllBlockingStreams) {
  order.stream_used(kA, StreamKind::kBlocking, 1);
  order.stream_used(kB, StreamKind::kNonBlocking, 2);
  EXPECT_EQ(order.of_stream(kLegacyStream, StreamKind::kLegacy), 1U);
}

TEST_F(OrderTest, BlockingStreamsWaitForTheLegacyStream) {
  order.stream_used(kLegacyStream, StreamKind::kLegacy, 1);
  EXPECT_EQ(order.of_stream(kA, StreamKind::kBlocking), 1U);
  EXPECT_EQ(order.of_stream(0, StreamKind::kPerThread), 1U);
  EXPECT_EQ(order.of_stream(kA, StreamKind::kNonBlocking), 0U);
  order.stream_used(kB, StreamKind::kBlocking, 2);
  EXPECT_EQ(order.of_stream(kA, StreamKind::kBlocking), 1U);  // blocking streams do not wait for one another
}

TEST_F(OrderTest, AnEventsPositionIsItsLastRecordOrWait) {
  order.event_recorded(kE, 4);
  order.event_awaited(kE, 7);
  order.event_awaited(kF, 8);
  EXPECT_EQ(order.of_event(kE), 7U);
  EXPECT_EQ(order.record_of(kE), 4U);
  EXPECT_EQ(order.of_event(kF), 8U);
  EXPECT_EQ(order.record_of(kF), 0U);  // a query sees records, not waits
}

TEST_F(OrderTest, AGraphsPositionIsItsLastLaunch) {
  order.graph_launched(kE, 4);
  order.graph_launched(kF, 5);
  order.graph_launched(kE, 6);
  EXPECT_EQ(order.of_graph(kE), 6U);
  EXPECT_EQ(order.of_graph(kF), 5U);
  EXPECT_EQ(order.of_graph(kA), 0U);
}

TEST_F(OrderTest, ADestroyedEventIsAsQueuedAsItsEndAndNoQuerySeesARecord) {
  order.event_recorded(kE, 4);
  order.event_destroyed(kE, 6);
  EXPECT_EQ(order.of_event(kE), 6U);
  EXPECT_EQ(order.record_of(kE), 0U);
  EXPECT_EQ(order.end(), 6U);
}

TEST_F(OrderTest, FullTablesAnswerLaterNeverEarlier) {
  Position position = 0;
  constexpr std::uint64_t kHandles = 20'000;
  for (std::uint64_t stream = 1; stream <= kHandles; ++stream) {
    order.stream_used(stream * 64, StreamKind::kNonBlocking, ++position);
    order.event_recorded(stream * 64, position);
  }
  for (std::uint64_t stream = 1; stream <= kHandles; ++stream) {
    EXPECT_GE(order.of_stream(stream * 64, StreamKind::kNonBlocking), stream);
    EXPECT_GE(order.of_event(stream * 64), stream);
    EXPECT_GE(order.record_of(stream * 64), stream);
  }
}

// Each launch of a full ring on a stream of its own, with two events of its own: the tables hold them all.
TEST_F(OrderTest, AFullRingLeavesNothingOut) {
  for (Position position = 1; position <= 4096; ++position) {
    order.stream_used(position * 64, StreamKind::kNonBlocking, position);
    order.event_recorded(position * 128, position);
    order.event_recorded(position * 128 + 64, position);
  }
  EXPECT_EQ(order.of_stream(3, StreamKind::kNonBlocking), 0U);
  EXPECT_EQ(order.of_event(3), 0U);
  EXPECT_EQ(order.of_stream(64, StreamKind::kNonBlocking), 1U);
}

TEST_F(OrderTest, WhatIsPassedMakesRoom) {
  for (Position position = 1; position <= 100'000; ++position) {
    order.passed(position - 1);
    order.stream_used(position * 64, StreamKind::kNonBlocking, position);
    order.event_recorded(position * 64, position);
  }
  // Nothing was left out: a stream that was never used waits for nothing.
  EXPECT_EQ(order.of_stream(3, StreamKind::kNonBlocking), 0U);
  EXPECT_EQ(order.of_event(3), 0U);
}

TEST_F(OrderTest, AHandleThatIsDestroyedIsForgotten) {
  order.stream_used(kA, StreamKind::kNonBlocking, 1);
  order.event_recorded(kE, 2);
  order.forget_stream(kA);
  order.forget_event(kE);
  EXPECT_EQ(order.of_stream(kA, StreamKind::kNonBlocking), 0U);
  EXPECT_EQ(order.of_event(kE), 0U);
}

TEST_F(OrderTest, AContextThatGoesLeavesOtherContextsOrdered) {
  order.stream_used(kA, StreamKind::kNonBlocking, 5);
  order.event_recorded(kE, 6);
  order.forget_streams_and_events();
  EXPECT_GE(order.of_stream(kA, StreamKind::kNonBlocking), 5U);
  EXPECT_GE(order.of_event(kE), 6U);
}

// What docs/order.md says of who may wait behind a closed gate, case by case.
TEST(WaitBehindTheGate, LatencyWorkNever) {
  for (const bool process_has_latency : {false, true}) {
    for (const auto what : {Waiter::For::kSynchronise, Waiter::For::kLaunch, Waiter::For::kOther}) {
      EXPECT_FALSE(may_wait_behind_the_gate({what, true, false}, process_has_latency));
    }
  }
}

TEST(WaitBehindTheGate, AProcessWithoutLatencyRegionsSimplyWaits) {
  for (const bool gil : {false, true}) {
    for (const auto what : {Waiter::For::kSynchronise, Waiter::For::kLaunch, Waiter::For::kOther}) {
      EXPECT_TRUE(may_wait_behind_the_gate({what, false, gil}, false));
    }
  }
}

TEST(WaitBehindTheGate, BesideLatencyRegionsOnlySynchronisesAndRoomWithoutTheGil) {
  EXPECT_TRUE(may_wait_behind_the_gate({Waiter::For::kSynchronise, false, false}, true));
  EXPECT_TRUE(may_wait_behind_the_gate({Waiter::For::kLaunch, false, false}, true));
  EXPECT_FALSE(may_wait_behind_the_gate({Waiter::For::kSynchronise, false, true}, true));
  EXPECT_FALSE(may_wait_behind_the_gate({Waiter::For::kLaunch, false, true}, true));
  EXPECT_FALSE(may_wait_behind_the_gate({Waiter::For::kOther, false, false}, true));
  EXPECT_FALSE(may_wait_behind_the_gate({Waiter::For::kOther, false, true}, true));
}

TEST(FixedMap, BehavesAsAMapOfBoundedSize) {
  FixedMap<int, 64> table;
  std::map<std::uint64_t, int> model;
  std::mt19937 random(7);
  for (int step = 0; step < 200'000; ++step) {
    const std::uint64_t handle = 16 * (1 + random() % 80);
    switch (random() % 4) {
      case 0:
        table.remove(handle);
        model.erase(handle);
        break;
      case 1: {
        const int* found = table.find(handle);
        ASSERT_EQ(found != nullptr, model.contains(handle));
        if (found != nullptr) {
          ASSERT_EQ(*found, model[handle]);
        }
        break;
      }
      case 2:
        if (step % 1000 == 0) {
          const auto odd = [](int value) { return value % 2 != 0; };
          table.sweep(odd);
          std::erase_if(model, [&](const auto& entry) { return odd(entry.second); });
        }
        break;
      default:
        if (int* place = table.add(handle)) {
          *place = step;
          model[handle] = step;
        } else {
          ASSERT_EQ(model.size(), table.kCapacity);
          ASSERT_FALSE(model.contains(handle));
        }
    }
    ASSERT_EQ(table.size(), model.size());
  }
  EXPECT_EQ(table.find(0), nullptr);
  EXPECT_EQ(table.add(0), nullptr);
}

}  // namespace
}  // namespace cudasched::queue
