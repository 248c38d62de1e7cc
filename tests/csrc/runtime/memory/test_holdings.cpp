#include <gtest/gtest.h>

#include <map>
#include <random>
#include <thread>
#include <vector>

#include "runtime/memory/holdings.hpp"

namespace cudasched::runtime {
namespace {

constexpr auto kNormal = Class::kNormal;
constexpr auto kLatency = Class::kLatency;
constexpr auto kBestEffort = Class::kBestEffort;

// As a call that allocates does.
bool allocate(Holdings& holdings, std::uint64_t address, std::uint64_t bytes, Class client_class = kNormal,
              int device = 0, const void* context = nullptr) {
  if (!holdings.reserve(device, bytes)) return false;
  holdings.hold(address, {bytes, device, client_class, context});
  return true;
}

void free(Holdings& holdings, std::uint64_t address) {
  const Holdings::Held held = holdings.forget(address);
  if (held.device >= 0) holdings.is_gone(held);
}

TEST(Holdings, CountByDeviceAndClass) {
  Holdings holdings;
  EXPECT_TRUE(allocate(holdings, 1, 100, kLatency));
  EXPECT_TRUE(allocate(holdings, 2, 50, kBestEffort));
  EXPECT_TRUE(allocate(holdings, 3, 7, kBestEffort, 1));
  EXPECT_EQ(holdings.held(0), 150u);
  EXPECT_EQ(holdings.there(0, kLatency), 100u);
  EXPECT_EQ(holdings.there(1, kBestEffort), 7u);
  free(holdings, 1);
  free(holdings, 1);  // a second time, which the driver refuses
  free(holdings, 99);
  EXPECT_EQ(holdings.held(0), 50u);
  EXPECT_EQ(holdings.peak(0), 150u);
  EXPECT_EQ(holdings.most_held(), 50u);
}

TEST(Holdings, RefuseWhatWouldPassTheLimit) {
  Holdings holdings;
  holdings.set_limit(100);
  EXPECT_TRUE(allocate(holdings, 1, 60));
  EXPECT_FALSE(allocate(holdings, 2, 41));
  EXPECT_FALSE(allocate(holdings, 2, ~std::uint64_t{0}));
  EXPECT_TRUE(allocate(holdings, 2, 40));
  EXPECT_TRUE(allocate(holdings, 3, 100, kNormal, 1));  // of each device
  EXPECT_EQ(holdings.refused(), 2u);
  free(holdings, 1);
  EXPECT_TRUE(allocate(holdings, 4, 60));
  EXPECT_EQ(holdings.held(0), 100u);
}

TEST(Holdings, RefuseUnderALimitWhatHasNoRoom) {
  Holdings holdings;
  EXPECT_TRUE(holdings.reserve(0, 60, 10));  // without a limit the driver decides alone
  holdings.set_limit(1000);
  EXPECT_FALSE(holdings.reserve(0, 60, 59));
  EXPECT_TRUE(holdings.reserve(0, 60, 60));
  EXPECT_EQ(holdings.held(0), 120u);
  EXPECT_EQ(holdings.refused(), 1u);
}

// As programs that try less and less until the driver has so much.
TEST(Holdings, APeakIsOfMemoryThatWasThere) {
  Holdings holdings;
  EXPECT_TRUE(holdings.reserve(0, 1000));
  EXPECT_TRUE(allocate(holdings, 1, 10));  // another thread's meanwhile
  EXPECT_EQ(holdings.held(0), 1010u);
  EXPECT_EQ(holdings.there(0), 10u);
  EXPECT_EQ(holdings.there(0, kNormal), 10u);
  holdings.give_up(0, 1000);  // the driver refuses
  EXPECT_EQ(holdings.peak(0), 10u);
  holdings.put_back(1, holdings.forget(1));  // and this free
  EXPECT_EQ(holdings.there(0), 10u);
  holdings.hold_pool(7, 0, kNormal, 30);
  holdings.hold_pool(7, 0, kNormal, 5);
  free(holdings, 1);
  EXPECT_EQ(holdings.there(0), 5u);
  EXPECT_EQ(holdings.held(0), 5u);
  EXPECT_EQ(holdings.peak(0), 40u);
}

TEST(Holdings, ThreadsCannotPassTheLimitTogether) {
  Holdings holdings;
  holdings.set_limit(1000);
  std::atomic<std::uint64_t> got{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (std::uint64_t j = 0; j < 200; ++j) {
        if (allocate(holdings, static_cast<std::uint64_t>(i) << 32 | j, 3)) got.fetch_add(3);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(got.load(), 999u);
  EXPECT_EQ(holdings.held(0), 999u);
}

TEST(Holdings, PhysicalMemoryCountsUntilItIsReleasedAndMappedNowhere) {
  Holdings holdings;
  const auto create = [&](std::uint64_t handle, std::uint64_t bytes) {
    EXPECT_TRUE(holdings.reserve(0, bytes));
    holdings.hold_physical(handle, {bytes, 0, kNormal, nullptr});
  };
  const auto release = [&](std::uint64_t handle) {
    const auto released = holdings.release_physical(handle);
    holdings.is_gone(released);
    return released.held.device;
  };
  create(7, 20);
  create(8, 20);
  holdings.map_physical(0x1000, 20, 7);
  holdings.map_physical(0x1000 + 20, 20, 8);
  release(7);  // as programs do that keep the mapping alone
  EXPECT_EQ(holdings.held(0), 40u);
  EXPECT_EQ(holdings.is_gone(holdings.unmap_physical(0x1000, 40)), 0);
  EXPECT_EQ(holdings.held(0), 20u);
  EXPECT_EQ(release(8), 0);
  EXPECT_EQ(holdings.held(0), 0u);
  EXPECT_EQ(release(8), -1);
  create(7, 5);  // the driver gives a handle away again
  holdings.retain_physical(7);
  release(7);
  EXPECT_EQ(holdings.held(0), 5u);
  release(7);
  EXPECT_EQ(holdings.held(0), 0u);
}

TEST(Holdings, WhatTheDriverRefusesChangesNothing) {
  Holdings holdings;
  EXPECT_TRUE(holdings.reserve(0, 20));
  holdings.hold_physical(7, {20, 0, kNormal, nullptr});
  const auto refused_release = [&] { holdings.put_back(holdings.release_physical(7)); };
  const auto refused_unmap = [&] { holdings.put_back(holdings.unmap_physical(0x1000, 20)); };
  refused_unmap();
  refused_release();  // of the only reference
  EXPECT_EQ(holdings.held(0), 20u);
  holdings.map_physical(0x1000, 20, 7);
  refused_release();  // of a reference beside a mapping
  refused_unmap();
  holdings.is_gone(holdings.release_physical(7));
  refused_release();  // of one that is released already
  refused_unmap();    // of the last that holds it
  EXPECT_EQ(holdings.held(0), 20u);
  EXPECT_EQ(holdings.is_gone(holdings.unmap_physical(0x1000, 20)), 0);
  EXPECT_EQ(holdings.held(0), 0u);
}

TEST(Holdings, APoolCountsWithWhatItHasNow) {
  Holdings holdings;
  holdings.hold_pool(1, 0, kBestEffort, 64);
  holdings.hold_pool(1, 0, kLatency, 100);  // it stays of the class that came first
  EXPECT_EQ(holdings.there(0, kBestEffort), 100u);
  holdings.hold_pool(1, 0, kBestEffort, 30);
  EXPECT_EQ(holdings.held(0), 30u);
  EXPECT_EQ(holdings.device_of_pool(1), 0);
  EXPECT_EQ(holdings.device_of_pool(2), -1);
  std::vector<Holdings::Pool> pools;
  holdings.list_pools(0, pools);
  EXPECT_EQ(pools.size(), 1u);
  holdings.forget_pool(1);
  EXPECT_EQ(holdings.held(0), 0u);
}

TEST(Holdings, AContextTakesItsMemoryWithIt) {
  Holdings holdings;
  const int first = 0;
  const int second = 0;
  allocate(holdings, 1, 10, kNormal, 0, &first);
  allocate(holdings, 2, 20, kNormal, 0, &second);
  allocate(holdings, 3, 40, kNormal, 1, &second);
  allocate(holdings, 4, 80, kNormal, 0, nullptr);
  holdings.context_ended(-1, &first);
  EXPECT_EQ(holdings.held(0), 100u);
  holdings.context_ended(0, nullptr);  // the device's primary context
  EXPECT_EQ(holdings.held(0), 80u);
  EXPECT_EQ(holdings.held(1), 40u);
}

TEST(Holdings, AForkedChildHasNothing) {
  Holdings holdings;
  allocate(holdings, 1, 10);
  holdings.reset_in_child();
  EXPECT_EQ(holdings.held(0), 0u);
  free(holdings, 1);
  EXPECT_EQ(holdings.held(0), 0u);
}

TEST(Holdings, AgreeWithASumOverWhatIsThere) {
  std::mt19937 random(7);
  Holdings holdings;
  std::map<std::uint64_t, Holdings::Held> there;
  for (int step = 0; step < 20'000; ++step) {
    if (there.empty() || random() % 2 == 0) {
      const Holdings::Held held{1 + random() % 1000, static_cast<int>(random() % 2), static_cast<Class>(random() % 3),
                                nullptr};
      const std::uint64_t address = 1 + random() % 100'000;
      if (there.contains(address)) continue;
      ASSERT_TRUE(allocate(holdings, address, held.bytes, held.client_class, held.device));
      there.emplace(address, held);
    } else {
      auto place = there.begin();
      std::advance(place, random() % std::min<std::size_t>(there.size(), 8));
      free(holdings, place->first);
      there.erase(place);
    }
    if (step % 500 != 0) continue;
    std::array<std::array<std::uint64_t, kClassCount>, 2> sums{};
    for (const auto& [address, held] : there) {
      sums[static_cast<std::size_t>(held.device)][static_cast<std::size_t>(held.client_class)] += held.bytes;
    }
    for (int device = 0; device < 2; ++device) {
      std::uint64_t all = 0;
      for (int i = 0; i < kClassCount; ++i) {
        const std::uint64_t sum = sums[static_cast<std::size_t>(device)][static_cast<std::size_t>(i)];
        ASSERT_EQ(holdings.there(device, static_cast<Class>(i)), sum);
        all += sum;
      }
      ASSERT_EQ(holdings.held(device), all);
    }
  }
}

}  // namespace
}  // namespace cudasched::runtime
