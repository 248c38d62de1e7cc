#include <gtest/gtest.h>

#include <map>
#include <random>
#include <thread>
#include <vector>

#include "torch/accounts.hpp"
#include "torch/ring.hpp"

namespace cudasched::torch_memory {
namespace {

constexpr std::uint8_t kLatency = 1;
constexpr std::uint8_t kBestEffort = 2;

Record record(Action action, std::uint64_t address, std::uint64_t bytes, std::uint64_t stream = 0,
              std::uint8_t client_class = 0, std::uint32_t region = 0) {
  return {action, 0, client_class, region, address, bytes, stream};
}

Device begun() {
  Device device;
  device.apply(record(Action::kSnapshot, 0, 0));
  return device;
}

TEST(Accounts, CountWhatIsAllocatedByClassStreamAndRegion) {
  Device device = begun();
  device.apply(record(Action::kAllocate, 0x10, 100, 7, kLatency, 1));
  device.apply(record(Action::kAllocate, 0x20, 50, 8, kBestEffort, 2));
  EXPECT_EQ(device.requested.bytes, 150u);
  EXPECT_EQ(device.by_class[kLatency].bytes, 100u);
  EXPECT_EQ(device.by_class[kBestEffort].bytes, 50u);
  EXPECT_EQ(device.by_stream[7].bytes, 100u);
  EXPECT_EQ(device.by_region[2].bytes, 50u);
  device.apply(record(Action::kFree, 0x10, 100));
  EXPECT_EQ(device.requested.bytes, 50u);
  EXPECT_EQ(device.by_class[kLatency].bytes, 0u);
  EXPECT_EQ(device.by_class[kLatency].peak, 100u);
  EXPECT_EQ(device.requested.peak, 150u);
}

TEST(Accounts, AStreamsClassGoesBeforeTheThreads) {
  Device device = begun();
  device.name_stream(7, kBestEffort);
  device.apply(record(Action::kAllocate, 0x10, 100, 7, kLatency));
  EXPECT_EQ(device.by_class[kBestEffort].bytes, 100u);
}

TEST(Accounts, ABackwardPassIsOfTheRegionThatItsStreamServesLast) {
  Device device = begun();
  device.name_stream(7, kBestEffort);
  device.limit(3, 120);
  device.apply(record(Action::kAllocate, 0x10, 100, 7, kBestEffort, 3));
  device.apply(record(Action::kAllocate, 0x20, 50, 7, 0, kUntold));
  device.apply(record(Action::kAllocate, 0x30, 5, 8, 0, kUntold));
  EXPECT_EQ(device.by_region[3].bytes, 150u);
  EXPECT_EQ(device.over_limit(3), 1u);
  EXPECT_EQ(device.by_region[0].bytes, 5u);
}

TEST(Accounts, BeginWithTheSnapshotAndNotWithWhatItHas) {
  Device device;
  device.begin_with(0x10, 100, 0);
  device.begin_with_reserved(2048);
  device.apply(record(Action::kAllocate, 0x20, 5));  // before the snapshot was taken: it has this, or it is gone
  device.apply(record(Action::kReserve, 0, 7));
  device.apply(record(Action::kSnapshot, 0, 0));
  EXPECT_EQ(device.requested.bytes, 100u);
  EXPECT_EQ(device.reserved.bytes, 2048u);
  device.apply(record(Action::kFree, 0x10, 100));
  device.apply(record(Action::kSnapshot, 0, 0));  // later ones change nothing
  EXPECT_EQ(device.requested.bytes, 0u);
  EXPECT_EQ(device.unknown_frees, 0u);
}

TEST(Accounts, ARegionsLimitCountsEachTimeThatItIsPassed) {
  Device device = begun();
  device.limit(1, 100);
  device.apply(record(Action::kAllocate, 1, 100, 0, kLatency, 1));
  EXPECT_EQ(device.over_limit(1), 0u);
  device.apply(record(Action::kAllocate, 2, 1, 0, kLatency, 1));
  device.apply(record(Action::kAllocate, 3, 1, 0, kLatency, 1));  // still over
  device.apply(record(Action::kAllocate, 4, 500, 0, kLatency, 2));
  EXPECT_EQ(device.over_limit(1), 1u);
  device.apply(record(Action::kFree, 1, 100));
  device.apply(record(Action::kAllocate, 5, 99, 0, kLatency, 1));
  EXPECT_EQ(device.over_limit(1), 2u);
  EXPECT_EQ(device.over_limit(2), 0u);
}

TEST(Accounts, AFreeThatNobodyKnowsIsCounted) {
  Device device = begun();
  device.apply(record(Action::kFree, 0x10, 100));
  EXPECT_EQ(device.unknown_frees, 1u);
  EXPECT_EQ(device.requested.bytes, 0u);
}

TEST(Accounts, AgreeWithASumOverWhatIsThere) {
  std::mt19937 random(1);
  Device device = begun();
  std::map<std::uint64_t, Record> there;
  std::uint64_t next = 1;
  for (int step = 0; step < 20'000; ++step) {
    if (there.empty() || random() % 2 == 0) {
      const Record made = record(Action::kAllocate, next++, 1 + random() % 1000, random() % 4,
                                 static_cast<std::uint8_t>(random() % 3), random() % 5);
      there.emplace(made.address, made);
      device.apply(made);
    } else {
      auto place = there.begin();
      std::advance(place, random() % std::min<std::size_t>(there.size(), 8));
      device.apply(record(Action::kFree, place->first, place->second.bytes));
      there.erase(place);
    }
    if (step % 500 != 0) continue;
    std::uint64_t all = 0;
    std::array<std::uint64_t, 3> by_class{};
    for (const auto& [address, made] : there) {
      all += made.bytes;
      by_class[made.client_class] += made.bytes;
    }
    ASSERT_EQ(device.requested.bytes, all);
    for (std::size_t i = 0; i < by_class.size(); ++i) ASSERT_EQ(device.by_class[i].bytes, by_class[i]);
  }
}

TEST(Timeline, HasTheMostOfEachIntervalByClassAndRegion) {
  Device device = begun();
  const auto at = [](Record made, std::int64_t time_ns) {
    made.time_ns = time_ns;
    return made;
  };
  device.apply(at(record(Action::kAllocate, 1, 100, 0, kLatency, 1), 1'000));
  device.apply(at(record(Action::kAllocate, 2, 50, 0, kBestEffort, 99), 2'000));
  device.apply(at(record(Action::kFree, 1, 100), 3'000));
  device.apply(at(record(Action::kReserve, 0, 4096), 5'000'000));
  const auto& points = device.timeline.points();
  ASSERT_EQ(points.size(), 2u);
  EXPECT_EQ(points[0].by_class[kLatency], 100u);
  EXPECT_EQ(points[0].by_region[1], 100u);
  EXPECT_EQ(points[0].by_region[Timeline::kRegions - 1], 50u) << "regions beyond stand together";
  EXPECT_EQ(points[1].by_class[kLatency], 0u);
  EXPECT_EQ(points[1].reserved, 4096u);
}

TEST(Timeline, IsBoundedAndForgetsNoPeak) {
  Timeline timeline;
  std::mt19937_64 random(3);
  std::int64_t now = 1;
  std::uint64_t most = 0;
  for (int i = 0; i < 50'000; ++i) {
    now += static_cast<std::int64_t>(random() % 10'000'000);
    Timeline::Point point;
    point.begin_ns = now;
    point.reserved = random() % 1'000'000;
    most = std::max(most, point.reserved);
    timeline.add(point);
    ASSERT_LE(timeline.points().size(), Timeline::kPoints);
  }
  std::uint64_t kept = 0;
  std::int64_t before = 0;
  for (const Timeline::Point& point : timeline.points()) {
    kept = std::max(kept, point.reserved);
    EXPECT_GT(point.begin_ns, before);
    before = point.begin_ns;
  }
  EXPECT_EQ(kept, most);
  EXPECT_GT(timeline.points().size(), Timeline::kPoints / 4);
}

TEST(Ring, GivesWhatItWasGivenInOrderAndCountsWhatHadNoPlace) {
  Ring<int> ring(4);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(ring.push(i), i < 4);
  EXPECT_EQ(ring.lost(), 2u);
  int value = -1;
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(ring.pop(value));
    EXPECT_EQ(value, i);
  }
  EXPECT_FALSE(ring.pop(value));
  EXPECT_TRUE(ring.push(9));
  EXPECT_TRUE(ring.pop(value));
  EXPECT_EQ(value, 9);
}

TEST(Ring, LosesNothingBetweenManyWritersAndAReader) {
  constexpr int kWriters = 3;
  constexpr int kEach = 20'000;
  Ring<std::uint64_t> ring(1024);
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&ring, writer] {
      for (int i = 0; i < kEach; ++i) {
        while (!ring.push(static_cast<std::uint64_t>(writer) << 32 | static_cast<std::uint64_t>(i))) {
          std::this_thread::yield();
        }
      }
    });
  }
  std::array<std::uint64_t, kWriters> expected{};
  for (int seen = 0; seen < kWriters * kEach;) {
    std::uint64_t value = 0;
    if (!ring.pop(value)) {
      std::this_thread::yield();
      continue;
    }
    ASSERT_EQ(value & 0xffffffff, expected[value >> 32]++);
    ++seen;
  }
  for (auto& writer : writers) writer.join();
}

}  // namespace
}  // namespace cudasched::torch_memory
