// Whether all thread blocks are short.
#include <gtest/gtest.h>

#include <cstdint>

#include "schedule/block_length.hpp"

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

TEST(BlockLength, OfAKernelIsItsTimeOverTheTurnsOfItsBlocks) {
  constexpr std::uint64_t kAtOnce = 132 * 2048;
  EXPECT_EQ(BlockLength::longest_ns(3'000'000, 60 * kAtOnce, kAtOnce), 50'000);
  EXPECT_EQ(BlockLength::longest_ns(3'000'000, 132 * 384, kAtOnce), 3'000'000);  // all blocks at once
  EXPECT_EQ(BlockLength::longest_ns(3'000'000, 0, kAtOnce), 3'000'000);
  EXPECT_EQ(BlockLength::longest_ns(3'000'000, kAtOnce, 0), 11);  // a device that does not say
}

TEST(BlockLength, ShortBlocksAreBelievedAfterAWhileAndSomeLaunches) {
  constexpr std::int64_t kBelieved = 100 * kSecond + BlockLength::kCalmNs;
  BlockLength length;
  EXPECT_FALSE(length.are_short(100 * kSecond, 7, 0));
  EXPECT_FALSE(length.are_short(kBelieved - 1, 7 + BlockLength::kFewest, 0));
  EXPECT_FALSE(length.are_short(kBelieved, 6 + BlockLength::kFewest, 0));
  EXPECT_TRUE(length.are_short(kBelieved, 7 + BlockLength::kFewest, 0));
  EXPECT_TRUE(length.are_short(500 * kSecond, 7 + BlockLength::kFewest, 0));
}

TEST(BlockLength, ALongBlockEndsItAtOnceAndForLongerEachTime) {
  BlockLength length;
  std::int64_t now = 100 * kSecond;
  std::int64_t calm_ns = BlockLength::kCalmNs;
  std::int64_t long_ns = 0;
  std::uint64_t launches = 0;
  for (int times = 0; times < 8; ++times) {
    length.are_short(now, launches, long_ns);
    launches += BlockLength::kFewest;
    EXPECT_FALSE(length.are_short(now + calm_ns - 1, launches, long_ns)) << times;
    EXPECT_TRUE(length.are_short(now += calm_ns, launches, long_ns)) << times;
    long_ns = now += kSecond;
    EXPECT_FALSE(length.are_short(now, launches, long_ns));
    calm_ns = std::min(4 * calm_ns, BlockLength::kMostCalmNs);
  }
}

TEST(BlockLength, AProgramOfLongBlocksIsNeverShort) {
  BlockLength length;
  std::uint64_t launches = 0;
  for (std::int64_t now = 100 * kSecond; now < 130 * kSecond; now += kSecond / 2) {
    EXPECT_FALSE(length.are_short(now, launches += BlockLength::kFewest, now - 1000));
  }
}

}  // namespace
}  // namespace cudasched::schedule
