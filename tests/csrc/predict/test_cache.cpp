#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "predict/cache.hpp"

namespace cudasched::predict {
namespace {

void add(CacheEntry& entry, double duration_ns) { entry.add({static_cast<float>(duration_ns), 0}); }

double measured(const CacheEntry& entry) { return std::exp(static_cast<double>(entry.measured_log)); }

TEST(CacheEntry, MedianOfTheFirstThree) {
  CacheEntry entry;
  add(entry, 50'000);
  EXPECT_NEAR(measured(entry), 50'000, 50);
  add(entry, 900'000);
  EXPECT_NEAR(measured(entry), 50'000, 50);
  add(entry, 51'000);
  EXPECT_NEAR(measured(entry), 51'000, 50);
}

TEST(CacheEntry, OneOutlierMovesItLittle) {
  CacheEntry entry;
  for (int i = 0; i < 20; ++i) add(entry, 50'000);
  add(entry, 50'000'000);
  EXPECT_GT(measured(entry), 50'000);
  EXPECT_LT(measured(entry), 56'000);
}

TEST(CacheEntry, ThreeOutliersOnOneSideAreAChangeOfWork) {
  CacheEntry entry;
  for (int i = 0; i < 20; ++i) add(entry, 50'000);
  for (int i = 0; i < 3; ++i) add(entry, 400'000);
  EXPECT_NEAR(measured(entry), 400'000, 400);
  EXPECT_EQ(entry.samples, 1U);
}

TEST(CacheEntry, OutliersOnBothSidesAreNoise) {
  CacheEntry entry;
  for (int i = 0; i < 20; ++i) add(entry, 50'000);
  for (int i = 0; i < 12; ++i) add(entry, i % 2 == 0 ? 500'000 : 5'000);
  EXPECT_NEAR(measured(entry), 50'000, 10'000);
}

TEST(CacheEntry, TheNumberOfSamplesEndsWithItsType) {
  CacheEntry entry;
  for (int i = 0; i < 5; ++i) add(entry, 50'000);
  entry.samples = ~std::uint32_t{0};
  for (int i = 0; i < 2; ++i) add(entry, 55'000);
  EXPECT_EQ(entry.samples, ~std::uint32_t{0});
  EXPECT_NEAR(measured(entry), 51'800, 200);
  EXPECT_LT(entry.spread, 0.05);
}

// Samples of a shared key whose words are like nobody's.
bool agrees(CacheEntry& entry, std::uint16_t words, double duration_ns) {
  return entry.agrees(words, {static_cast<float>(duration_ns), 0});
}

TEST(CacheEntry, ASharedKeySplitsAfterThreeThatLastedOtherwise) {
  CacheEntry entry;
  EXPECT_TRUE(agrees(entry, 1, 50'000));
  add(entry, 50'000);
  EXPECT_FALSE(agrees(entry, 3, 80'000));
  EXPECT_FALSE(agrees(entry, 5, 30'000));
  EXPECT_FALSE(entry.is_split);
  EXPECT_FALSE(agrees(entry, 7, 80'000));
  EXPECT_TRUE(entry.is_split);
}

TEST(CacheEntry, ASharedKeyForgetsDoubtsThatOthersDoNotShare) {
  CacheEntry entry;
  EXPECT_TRUE(agrees(entry, 1, 50'000));
  add(entry, 50'000);
  for (std::uint16_t i = 0; i < 50; ++i) {
    agrees(entry, 3, i % 5 == 0 ? 90'000 : 52'000);
    EXPECT_FALSE(entry.is_split) << i;
  }
}

TEST(CacheEntry, TheSameWordsAndShortDifferencesSplitNothing) {
  CacheEntry entry;
  EXPECT_TRUE(agrees(entry, 1, 1'500));
  add(entry, 1'500);
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(agrees(entry, 1, 90'000));
    EXPECT_TRUE(agrees(entry, 3, 1'900));
  }
  EXPECT_FALSE(entry.is_split);
}

TEST(CacheEntry, TracksASlowDriftAndItsOwnSpread) {
  CacheEntry entry;
  double actual = 50'000;
  for (int i = 0; i < 200; ++i) add(entry, actual *= 1.005);
  EXPECT_NEAR(measured(entry) / actual, 1.0, 0.05);
  EXPECT_LT(entry.spread, 0.05F);
  for (int i = 0; i < 200; ++i) add(entry, actual * (i % 2 == 0 ? 1.2 : 0.8));
  EXPECT_GT(entry.spread, 0.15F);
}

// As two events tell a kernel of that length on an H200: in the queue they add one of two amounts, beside a launch call
// nearly always the same; one launch in fifty is held up by something else.
Sample by_events(double duration_ns, bool queued, std::mt19937_64& random) {
  std::uniform_real_distribution<double> part;
  const double call_ns = queued ? 0 : 2'000 + 3'000 * part(random) * part(random);
  const double added = queued ? (part(random) < 0.45 ? 2'200 : 2'850) + 170 * part(random)
                              : call_ns + std::normal_distribution<double>(1'110, 100)(random);
  const double held_up = part(random) < 0.02 ? 3'000 * part(random) : 0;
  return event_sample({static_cast<std::int64_t>(duration_ns + added + held_up), static_cast<std::int64_t>(call_ns)});
}

TEST(CacheEntry, ShortKernelsTimedByEventsAreNotBiased) {
  std::mt19937_64 random(1);
  for (const bool queued : {true, false}) {
    for (const double actual : {900.0, 1'100.0, 1'350.0, 1'800.0, 3'100.0, 9'000.0}) {
      double sum = 0;
      double error = 0;
      constexpr int kKeys = 300;
      for (int key = 0; key < kKeys; ++key) {
        CacheEntry entry;
        for (int i = 0; i < 40; ++i) entry.add(by_events(actual, queued, random));
        sum += measured(entry) / kKeys;
        error += std::abs(measured(entry) / actual - 1) / kKeys;
      }
      EXPECT_NEAR(sum / actual, 1.0, queued ? 0.27 * 900 / actual : 0.02) << actual << queued;
      EXPECT_LT(error, queued ? 0.27 * 900 / actual : 0.05) << actual << queued;
    }
  }
}

TEST(CacheEntry, ShortSamplesOfASharedKeySplitNothingByTheirNoise) {
  std::mt19937_64 random(1);
  for (const bool queued : {true, false}) {
    CacheEntry entry;
    for (std::uint16_t i = 0; i < 200; ++i) {
      const Sample sample = by_events(1'400, queued, random);
      if (entry.agrees(static_cast<std::uint16_t>(2 * i + 1), sample)) entry.add(sample);
    }
    EXPECT_FALSE(entry.is_split) << queued;
  }
}

// A second length of a short kernel is not taken for noise.
TEST(CacheEntry, ShortKernelsThatTakeLongerFromNowOnAreFollowed) {
  std::mt19937_64 random(1);
  CacheEntry entry;
  for (int i = 0; i < 40; ++i) entry.add(by_events(1'500, false, random));
  for (int i = 0; i < 40; ++i) entry.add(by_events(6'000, false, random));
  EXPECT_NEAR(measured(entry) / 6'000, 1.0, 0.05);
}

// Far more keys than places: the table never fails, and the keys in use now are the ones it knows.
TEST(Cache, CrowdingDropsTheLeastRecentlyUsed) {
  const auto cache = std::make_unique<Cache>();
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i < 10 * Cache::kCapacity; ++i) {
    const std::uint64_t key = random() | 1;
    if (cache->find(key) == nullptr) cache->make(key);
  }
  std::vector<std::uint64_t> working(100);
  for (auto& key : working) cache->make(key = random() | 1);
  int known = 0;
  for (const std::uint64_t key : working) known += cache->find(key) != nullptr ? 1 : 0;
  EXPECT_GE(known, 99);
}

TEST(Cache, FindsWhatItMadeAndNothingElse) {
  const auto cache = std::make_unique<Cache>();
  EXPECT_EQ(cache->find(7), nullptr);
  CacheEntry& entry = cache->make(7);
  EXPECT_EQ(cache->find(7), &entry);
  EXPECT_EQ(cache->peek(7), &entry);
  EXPECT_EQ(cache->find(8), nullptr);
}

}  // namespace
}  // namespace cudasched::predict
