#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "predict/features.hpp"

namespace cudasched::predict {
namespace {

using Row = std::array<float, kFeatureCount>;

constexpr std::uint64_t kMemory = 0x7f12'0000'0000ULL;

float value(const Row& row, std::string_view name) {
  const auto* const found = std::find(kFeatureNames.begin(), kFeatureNames.end(), name);
  EXPECT_NE(found, kFeatureNames.end()) << name;
  return row[static_cast<std::size_t>(found - kFeatureNames.begin())];
}

struct Kernel {
  Launch launch;
  Function function;
  std::vector<std::uint32_t> words;
  Residency residency{4, 132};

  Row row(const Allocations* allocations) const {
    Row result;
    result.fill(std::nanf(""));
    features({launch, &function, words, residency, false}, allocations, result.data());
    return result;
  }
};

TEST(Features, AreEnoughAndNamedOnce) {
  EXPECT_GE(kFeatureCount, 24U);
  EXPECT_EQ(std::set<std::string_view>(kFeatureNames.begin(), kFeatureNames.end()).size(), kFeatureCount);
}

TEST(Features, OfAKernelByHand) {
  const Allocations allocations;
  Kernel kernel;
  kernel.launch.grid[0] = 1024;
  kernel.launch.block[0] = 256;
  kernel.function.traits.tile[0] = 128;
  kernel.words = {64, 0, 4096, 0, 64, 1, 0x3f80'0000, 512};
  const Row row = kernel.row(&allocations);
  EXPECT_EQ(value(row, "log_blocks"), 10);
  EXPECT_EQ(value(row, "log_threads"), 8);
  EXPECT_EQ(value(row, "log_total_threads"), 18);
  EXPECT_EQ(value(row, "occupancy"), 0.5F);
  EXPECT_EQ(value(row, "whole_waves"), 1);
  EXPECT_NEAR(value(row, "log_waves"), std::log2(1024.0 / 528.0), 0.09);
  EXPECT_FLOAT_EQ(value(row, "tail"), (1024.0F - 528.0F) / 528.0F);
  EXPECT_EQ(value(row, "log_tile_m"), 7);
  EXPECT_EQ(value(row, "log_size_1"), 12);
  EXPECT_EQ(value(row, "log_size_2"), 9);
  EXPECT_EQ(value(row, "log_size_3"), 6);  // the second 64 counts once
  EXPECT_EQ(value(row, "log_size_4"), 0);
  EXPECT_EQ(value(row, "log_product_3"), 27);
}

TEST(Features, DoNotDependOnTheOrderOfWords) {
  const Allocations allocations;
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    Kernel kernel;
    kernel.words.resize(2 + random() % 60);
    for (std::uint32_t& word : kernel.words) word = random() >> (random() % 32);
    const Row row = kernel.row(&allocations);
    std::shuffle(kernel.words.begin(), kernel.words.end(), random);
    ASSERT_EQ(kernel.row(&allocations), row);
  }
}

// Recorded blocks have zeros where pointers were; on line Allocations tells them.
TEST(Features, AreTheSameOnLineAndInRecordedData) {
  Allocations allocations;
  allocations.add(kMemory, std::uint64_t{8} << 30);
  const Allocations none;
  std::mt19937_64 random(4);
  for (int round = 0; round < 300; ++round) {
    Kernel online;
    online.words.resize(random() % 200);
    for (std::uint32_t& word : online.words) word = static_cast<std::uint32_t>(random() >> (32 + random() % 32));
    Kernel recorded = online;
    for (std::size_t at = 0; at + 1 < online.words.size(); at += 2) {
      const std::uint64_t pair = std::uint64_t{online.words[at + 1]} << 32 | online.words[at];
      const bool makes_pointer = random() % 3 == 0;
      if (makes_pointer) {
        const std::uint64_t pointer = kMemory + random() % (std::uint64_t{8} << 30);
        online.words[at] = static_cast<std::uint32_t>(pointer);
        online.words[at + 1] = static_cast<std::uint32_t>(pointer >> 32);
      }
      if (makes_pointer || allocations.contains(pair)) recorded.words[at] = recorded.words[at + 1] = 0;
    }
    ASSERT_EQ(online.row(&allocations), recorded.row(&none));
    ASSERT_EQ(online.row(&allocations), recorded.row(&allocations));
  }
}

TEST(Features, AreFiniteWhateverTheLaunch) {
  std::mt19937_64 random(5);
  const auto any = [&] { return static_cast<std::uint32_t>(random() >> (32 + random() % 33 % 32)); };
  for (int round = 0; round < 500; ++round) {
    Kernel kernel;
    for (int axis = 0; axis < 3; ++axis) {
      kernel.launch.grid[axis] = round == 0 ? 0xffff'ffffU : any();
      kernel.launch.block[axis] = round == 0 ? 0xffff'ffffU : any();
      kernel.launch.cluster[axis] = any();
    }
    kernel.launch.dynamic_shared_bytes = any();
    kernel.function.registers = any();
    kernel.residency = {static_cast<int>(any()) >> 8, static_cast<int>(any()) >> 8, static_cast<int>(any())};
    kernel.words.resize(random() % 1025, any());
    for (const float feature : kernel.row(nullptr)) ASSERT_TRUE(std::isfinite(feature));
  }
  const Launch launch;
  Row row{};
  features({launch, nullptr, {}, {0, 0, 0}, false}, nullptr, row.data());
  for (const float feature : row) EXPECT_TRUE(std::isfinite(feature));
}

}  // namespace
}  // namespace cudasched::predict
