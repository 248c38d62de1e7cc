#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "predict/features.hpp"
#include "predict/words.hpp"

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

// The committed model was trained on rows that are exactly so.
TEST(Features, OfAGemmAreWhatTrainingSaw) {
  const Allocations none;
  Kernel kernel;
  kernel.launch = {.grid = {96, 17, 3}, .block = {192, 2, 1}, .dynamic_shared_bytes = 98'304, .cluster = {2, 1, 1}};
  kernel.function.parameter_bytes = 240;
  kernel.function.registers = 168;
  kernel.function.local_bytes = 8;
  kernel.function.static_shared_bytes = 1'040;
  kernel.function.max_threads = 384;
  kernel.function.traits = traits_of("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn");
  for (std::uint32_t i = 1; i <= 60; ++i) kernel.words.push_back((i * i * i * 2'654'435'761U) >> (i % 29));
  kernel.residency = {2, 132, 2'048};
  const Row expected{0x1.864000p+3F,
                     0x1.a00000p+2F,
                     0x1.040000p+2F,
                     0x1.800000p+0F,
                     0x1.100000p+3F,
                     0x1.e00000p+2F,
                     0x1.000000p+0F,
                     0x1.000000p+0F,
                     0x1.4b2000p+4F,
                     0x1.080000p+4F,
                     0x1.408000p+3F,
                     0x1.500000p+7F,
                     0x1.800000p+1F,
                     0x1.100000p+3F,
                     0x1.000000p+1F,
                     0x1.800000p-2F,
                     0x1.0a8000p+2F,
                     0x1.0c0000p+2F,
                     0x1.1745d2p-1F,
                     0x1.080000p+7F,
                     0x1.c00000p+2F,
                     0x1.000000p+3F,
                     0x1.800000p+2F,
                     0x1.800000p+1F,
                     0x1.000000p+1F,
                     0x1.000000p+3F,
                     0x1.000000p+0F,
                     0x1.f80000p+2F,
                     0x1.b1bbcep+4F,
                     0x1.a2647ap+4F,
                     0x1.90459ap+4F,
                     0x1.8fcc48p+4F,
                     0x1.8fb3acp+4F,
                     0x1.8f8a82p+4F,
                     0x1.640000p+2F,
                     0x1.aa1024p+5F,
                     0x1.391978p+6F,
                     0x1.9d0c8ap+6F,
                     0x1.7a2de8p+5F,
                     0x1.f4bbcep+4F,
                     0x1.8b2000p+4F,
                     0x1.9a6f38p+2F,
                     0,
                     0,
                     0,
                     0,
                     -0x1.c20000p+2F,
                     0};
  EXPECT_EQ(kernel.row(&none), expected);
}

TEST(Features, OfAKnownBlockAreTheSizesOfItsWork) {
  Kernel kernel;
  kernel.launch.grid[0] = 64;
  kernel.function.traits = traits_of("sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize32x32x8_stage3");
  kernel.words.assign(184, 9'999'999);
  kernel.words[39] = 256;
  kernel.words[40] = 512;
  kernel.words[41] = 64;
  const Allocations none;
  const Row row = kernel.row(&none);
  EXPECT_EQ(value(row, "log_size_1"), 9);
  EXPECT_EQ(value(row, "log_size_4"), 0);
  EXPECT_EQ(value(row, "log_work_m"), 9);
  EXPECT_EQ(value(row, "log_work_n"), 8);
  EXPECT_EQ(value(row, "log_work_k"), 6);
  EXPECT_EQ(value(row, "log_work"), 23);
  EXPECT_EQ(value(row, "log_work_share"), 17);
  EXPECT_EQ(value(row, "log_work_greatest"), 17);
}

// Whatever the length, the place of the addresses and the number of repeats.
TEST(Features, OfSizesAreTheGreatestDistinctOnes) {
  Allocations allocations;
  allocations.add(kMemory, std::uint64_t{8} << 30);
  allocations.add(0x4000'0000, std::uint64_t{4} << 20);  // a heap below 4 GiB that was registered
  std::mt19937_64 random(6);
  for (int round = 0; round < 2'000; ++round) {
    Kernel kernel;
    kernel.words.resize(random() % 140);
    for (std::uint32_t& word : kernel.words) {
      word = random() % 2 == 0 ? static_cast<std::uint32_t>(random() % 9)
                               : static_cast<std::uint32_t>(random()) >> (random() % 32);
    }
    for (std::size_t at = 0; at + 1 < kernel.words.size(); at += 2) {
      if (random() % 4 != 0) continue;
      const std::uint64_t pointer =
          random() % 2 == 0 ? kMemory + (random() >> 31) : 0x4000'0000 + random() % (5U << 20);
      kernel.words[at] = static_cast<std::uint32_t>(pointer);
      kernel.words[at + 1] = static_cast<std::uint32_t>(pointer >> 32);
    }
    if (kernel.words.size() > 1 && random() % 2 == 0) {  // left of a stack
      kernel.words[0] = 12'372'048;
      kernel.words[1] = 32'697;
    }
    std::set<std::uint32_t, std::greater<>> sizes;
    int count = 0;
    for (std::size_t at = 0; at < kernel.words.size(); ++at) {
      const std::size_t even = at / 2 * 2;
      const bool paired = even + 1 < kernel.words.size();
      if (paired && allocations.contains(std::uint64_t{kernel.words[even + 1]} << 32 | kernel.words[even])) continue;
      if (paired && is_host_address(kernel.words[even], kernel.words[even + 1])) continue;
      if (kernel.words[at] < 2 || kernel.words[at] >= 1U << 28) continue;
      sizes.insert(kernel.words[at]);
      ++count;
    }
    Kernel plain;  // the same sizes, without what hides them
    plain.words.assign(sizes.begin(), sizes.end());
    plain.words.resize(std::min<std::size_t>(plain.words.size(), 6));
    for (const std::uint32_t word : std::vector(plain.words)) plain.words.insert(plain.words.end(), {0, word});
    const Allocations none;
    const Row row = kernel.row(&allocations);
    const Row expected = plain.row(&none);
    for (const char* const name :
         {"log_size_1", "log_size_2", "log_size_3", "log_size_4", "log_size_5", "log_size_6"}) {
      ASSERT_EQ(value(row, name), value(expected, name)) << name << ", round " << round;
    }
    Kernel counted;
    counted.words.assign(static_cast<std::size_t>(count), 7);
    ASSERT_EQ(value(row, "log_sizes"), value(counted.row(&none), "log_sizes"));
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
