#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "base/histogram.hpp"

namespace cudasched {
namespace {

TEST(Histogram, EveryTimeIsInTheBucketThatBeginsBelowIt) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) {
    const auto ns = static_cast<std::int64_t>(random() >> (1 + random() % 63));
    const auto bucket = static_cast<int>(Histogram::bucket_of(ns));
    ASSERT_GE(ns, Histogram::begin_ns(bucket));
    if (bucket + 1 < Histogram::kBuckets) {
      ASSERT_LT(ns, Histogram::begin_ns(bucket + 1));
    }
  }
}

TEST(Histogram, BucketsAreNarrow) {
  for (int bucket = 1; bucket + 1 < Histogram::kBuckets; ++bucket) {
    const auto begin = Histogram::begin_ns(bucket);
    const auto width = Histogram::begin_ns(bucket + 1) - begin;
    EXPECT_GT(width, 0);
    EXPECT_LE(4 * width, begin) << bucket;
    EXPECT_EQ(Histogram::bucket_of(begin), static_cast<std::size_t>(bucket));
    EXPECT_EQ(Histogram::bucket_of(begin - 1), static_cast<std::size_t>(bucket - 1));
  }
  EXPECT_EQ(Histogram::begin_ns(1), 1'024);
  EXPECT_EQ(Histogram::begin_ns(Histogram::kBuckets - 1), std::int64_t{1} << 34);
  EXPECT_EQ(Histogram::bucket_of(INT64_MAX), Histogram::kBuckets - 1U);
  EXPECT_EQ(Histogram::bucket_of(INT64_MIN), 0U);
}

TEST(Histogram, NothingIsLostBetweenThreads) {
  Histogram times;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10'000; ++i) times.add(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  times.add(-5);  // a clock that went back adds nothing to the sum
  cudasched_times read{};
  times.read(read);
  EXPECT_EQ(std::accumulate(std::begin(read.buckets), std::end(read.buckets), std::uint64_t{0}), 40'001U);
  EXPECT_EQ(read.sum_ns, 4U * (9'999U * 10'000U / 2));
  times.reset();
  cudasched_times none{};
  times.read(none);
  EXPECT_EQ(none.sum_ns + none.buckets[0], 0U);
}

}  // namespace
}  // namespace cudasched
