#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "telemetry/trace_ring.hpp"

namespace cudasched::telemetry {
namespace {

TraceRecord numbered(std::uint64_t number, std::uint16_t thread = 0) {
  TraceRecord record;
  record.what = number;
  record.stream = ~number;  // a record that is torn shows
  record.thread = thread;
  return record;
}

TEST(TraceRecord, KeepsDurationsOfMinutesAndBounds) {
  TraceRecord record;
  record.lasts(20LL * 60 * 1'000'000'000 / 2);
  EXPECT_EQ(record.duration_ns(), 10LL * 60 * 1'000'000'000);
  record.lasts(-5);
  EXPECT_EQ(record.duration_ns(), 0);
  record.lasts(INT64_MAX);
  EXPECT_EQ(record.duration_ns(), (1LL << 40) - 1);
  record.predicts(INT64_MAX);
  EXPECT_EQ(record.value, UINT32_MAX);
  record.at(Class::kBestEffort, 31);
  EXPECT_EQ(record.place, 2 | 31 << 2);
}

TEST(TraceRing, GivesBackWhatWasPutInInOrder) {
  const auto ring = std::make_unique<TraceRing<8>>();
  for (std::uint64_t round = 0; round < 5; ++round) {
    for (std::uint64_t i = 0; i < 6; ++i) EXPECT_TRUE(ring->push(numbered(round * 6 + i)));
    std::uint64_t next = round * 6;
    EXPECT_EQ(ring->drain(100, [&](const TraceRecord& record) { EXPECT_EQ(record.what, next++); }), 6U);
  }
  EXPECT_EQ(ring->drain(100, [](const TraceRecord&) {}), 0U);
}

TEST(TraceRing, DropsAndCountsWhatHasNoRoom) {
  const auto ring = std::make_unique<TraceRing<4>>();
  for (std::uint64_t i = 0; i < 10; ++i) EXPECT_EQ(ring->push(numbered(i)), i < 4);
  EXPECT_EQ(ring->dropped(), 6U);
  EXPECT_EQ(ring->drain(1, [](const TraceRecord& record) { EXPECT_EQ(record.what, 0U); }), 1U);
  EXPECT_TRUE(ring->push(numbered(10))) << "there is room again";
  EXPECT_FALSE(ring->push(numbered(11)));
}

// Nothing is lost that was not counted, nothing is torn, and what a thread puts in keeps its order.
TEST(TraceRing, KeepsEachThreadsOrderUnderContention) {
  constexpr std::uint64_t kEach = 20'000;
  constexpr std::uint16_t kThreads = 4;
  const auto ring = std::make_unique<TraceRing<256>>();
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (std::uint16_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::uint64_t i = 1; i <= kEach; ++i) ring->push(numbered(i, thread));
      --running;
    });
  }
  std::vector<std::uint64_t> last(kThreads);
  std::uint64_t taken = 0;
  const auto take = [&] {
    taken += ring->drain(64, [&](const TraceRecord& record) {
      EXPECT_EQ(record.stream, ~record.what);
      EXPECT_LT(last.at(record.thread), record.what);
      last.at(record.thread) = record.what;
    });
  };
  while (running > 0) take();
  for (std::thread& thread : threads) thread.join();
  for (std::uint64_t before = ~std::uint64_t{0}; before != taken;) {
    before = taken;
    take();
  }
  EXPECT_EQ(taken + ring->dropped(), kEach * kThreads);
}

}  // namespace
}  // namespace cudasched::telemetry
