#include <gtest/gtest.h>

#include <random>

#include "predict/allocations.hpp"

namespace cudasched::predict {
namespace {

constexpr std::uint64_t kPage = std::uint64_t{1} << Allocations::kPageBits;
constexpr std::uint64_t kBase = 0x7f12'3400'0000ULL;

TEST(Allocations, KnowsWhatWasAddedAndNothingElse) {
  Allocations allocations;
  allocations.add(kBase, 0);
  EXPECT_FALSE(allocations.contains(kBase));
  allocations.add(kBase + 100, 3 * kPage);
  EXPECT_TRUE(allocations.contains(kBase));  // a bit a page
  EXPECT_TRUE(allocations.contains(kBase + 100));
  EXPECT_TRUE(allocations.contains(kBase + 3 * kPage + 99));
  EXPECT_FALSE(allocations.contains(kBase - 1));
  EXPECT_FALSE(allocations.contains(kBase + 4 * kPage));
}

TEST(Allocations, EndsOfTheAddressSpace) {
  constexpr std::uint64_t kEnd = std::uint64_t{1} << Allocations::kAddressBits;
  Allocations allocations;
  allocations.add(kEnd - 1, ~std::uint64_t{0});
  EXPECT_TRUE(allocations.contains(kEnd - 1));
  EXPECT_FALSE(allocations.contains(kEnd));
  EXPECT_FALSE(allocations.contains(~std::uint64_t{0}));
  allocations.add(kEnd, 10);
  allocations.add(~std::uint64_t{0}, 10);
  EXPECT_FALSE(allocations.contains(kEnd));
  EXPECT_FALSE(allocations.contains(0));
  allocations.add(0, 1);
  EXPECT_TRUE(allocations.contains(0));
  EXPECT_FALSE(allocations.contains(kPage));
}

TEST(Allocations, AgreesWithAListOfRanges) {
  std::mt19937_64 random(1);
  Allocations allocations;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> pages;
  for (int i = 0; i < 200; ++i) {
    const std::uint64_t address = kBase + random() % (std::uint64_t{1} << 34);
    const std::uint64_t bytes = 1 + random() % (std::uint64_t{1} << (random() % 30));
    allocations.add(address, bytes);
    pages.emplace_back(address / kPage, (address + bytes - 1) / kPage);
  }
  for (int i = 0; i < 20'000; ++i) {
    const std::uint64_t address = kBase + random() % (std::uint64_t{1} << 35);
    bool expected = false;
    for (const auto& [first, last] : pages) expected |= address / kPage >= first && address / kPage <= last;
    ASSERT_EQ(allocations.contains(address), expected) << address;
  }
}

}  // namespace
}  // namespace cudasched::predict
