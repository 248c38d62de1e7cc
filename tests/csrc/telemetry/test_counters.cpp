#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>

#include "telemetry/counters.hpp"

namespace cudasched::telemetry {
namespace {

std::uint64_t count(const cudasched_times& times) {
  return std::accumulate(std::begin(times.buckets), std::end(times.buckets), std::uint64_t{0});
}

TEST(PredictionCounts, ErrorsAreSharesOfThePrediction) {
  EXPECT_EQ(PredictionCounts::bucket_of(1'000, 10), 0U);
  EXPECT_EQ(PredictionCounts::bucket_of(1'000, 11), 1U);
  EXPECT_EQ(PredictionCounts::bucket_of(1'000, 100), 3U);
  EXPECT_EQ(PredictionCounts::bucket_of(1'000, 2'000), 8U);
  EXPECT_EQ(PredictionCounts::bucket_of(1'000, 2'001), 9U);
  EXPECT_EQ(PredictionCounts::bucket_of(INT64_MAX / 4, INT64_MAX / 4), 7U);  // no overflow

  PredictionCounts counts;
  counts.add(1'000, 1'100, 1'100);
  counts.add(1'000, 1'100, 1'101);
  counts.add(1'000, 1'100, 500);
  counts.add(1'000, 1'100, 0);  // not measured
  counts.add(0, 0, 10);
  cudasched_counts read{};
  counts.read(read);
  EXPECT_EQ(read.predictions, 3U);
  EXPECT_EQ(read.within_bound, 2U);
  EXPECT_EQ(read.predicted_ns, 3'000U);
  EXPECT_EQ(read.measured_ns, 2'701U);
  EXPECT_EQ(read.prediction_off_ns, 701U);
}

TEST(RegionCounts, TargetsAreKeptOrMissedByName) {
  RegionCounts regions;
  const int search = regions.index_of("search");
  EXPECT_EQ(regions.index_of("search"), search);
  EXPECT_EQ(regions.index_of(""), 0);
  regions.add(search, 5'000'000, 4'000'000, true);
  regions.add(search, 5'000'000, 6'000'000, false);
  regions.add(search, 0, 9'000'000, false);  // no target: neither kept nor missed
  cudasched_counts read{};
  regions.read(read);
  const cudasched_region_counts& found = read.regions[search];
  EXPECT_STREQ(found.name, "search");
  EXPECT_EQ(found.met, 1U);
  EXPECT_EQ(found.missed, 1U);
  EXPECT_EQ(found.slo_ns, 5'000'000U);
  EXPECT_EQ(count(found.times), 3U);
  EXPECT_EQ(found.times.sum_ns, 19'000'000U);
}

TEST(RegionCounts, TooManyNamesAreCountedTogether) {
  RegionCounts regions;
  for (int i = 0; i < 100; ++i) regions.add(regions.index_of("region " + std::to_string(i)), 1, 1, true);
  cudasched_counts read{};
  regions.read(read);
  EXPECT_STREQ(read.regions[0].name, "");
  EXPECT_STREQ(read.regions[1].name, "region 0");
  EXPECT_STREQ(read.regions[RegionCounts::kMost - 1].name, "(others)");
  EXPECT_EQ(read.regions[RegionCounts::kMost - 1].met, 100U - (RegionCounts::kMost - 2U));
}

TEST(RegionCounts, ThreadsThatComeAtOnceFindOnePlace) {
  RegionCounts regions;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1'000; ++i) regions.add(regions.index_of("r" + std::to_string(i % 20)), 1, 1, true);
    });
  }
  for (std::thread& thread : threads) thread.join();
  cudasched_counts read{};
  regions.read(read);
  std::uint64_t sum = 0;
  for (const auto& region : read.regions) sum += region.met;
  EXPECT_EQ(sum, 4'000U);
  for (int i = 1; i < RegionCounts::kMost - 1; ++i) {
    for (int j = 1; j < i; ++j) EXPECT_STRNE(read.regions[i].name, read.regions[j].name);
  }
}

TEST(Counters, ReadSaysAllThatWasCountedAndAChildStartsAnew) {
  const auto counters = std::make_unique<Counters>();
  counters->shard(1).launches[2] += 2;
  counters->shard(17).launches[2] += 1;  // the same shard
  counters->shard(2).graph_launches += 1;
  counters->shard(3).untracked_launches += 4;
  counters->gate_waits.add(5'000);
  counters->preemptions.add(0);
  counters->shard(4).offloaded_launches += 5;  // these are launches, too
  counters->latency_active_ns += 77;
  cudasched_counts read{};
  counters->read(read);
  EXPECT_EQ(read.best_effort_launches, 8U);
  EXPECT_EQ(read.offloaded_launches, 5U);
  EXPECT_EQ(read.graph_launches, 1U);
  EXPECT_EQ(read.untracked_launches, 4U);
  EXPECT_EQ(count(read.gate_waits), 1U);
  EXPECT_EQ(count(read.preemptions), 1U);
  EXPECT_EQ(read.latency_active_ns, 77U);
  counters->reset();
  cudasched_counts none{};
  counters->read(none);
  EXPECT_EQ(none.best_effort_launches + none.graph_launches + none.untracked_launches + none.latency_active_ns, 0U);
  EXPECT_EQ(count(none.gate_waits) + count(none.preemptions), 0U);
}

}  // namespace
}  // namespace cudasched::telemetry
