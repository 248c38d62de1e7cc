#include <gtest/gtest.h>

#include "runtime/classify.hpp"

namespace cudasched::runtime {
namespace {

TEST(StreamClassesTest, FindsWhatIsBound) {
  static StreamClasses streams;
  Class value = Class::kNormal;
  EXPECT_TRUE(streams.empty());
  EXPECT_FALSE(streams.find(0x10, value));
  EXPECT_TRUE(streams.bind(0x10, Class::kLatency));
  EXPECT_TRUE(streams.bind(0x10, Class::kBestEffort));
  ASSERT_TRUE(streams.find(0x10, value));
  EXPECT_EQ(value, Class::kBestEffort);
  streams.unbind(0x10);
  EXPECT_FALSE(streams.find(0x10, value));
  EXPECT_TRUE(streams.empty());
}

TEST(StreamClassesTest, SaysWhenItIsFull) {
  static StreamClasses streams;
  for (std::uint64_t stream = 1; stream <= StreamClasses::kCapacity; ++stream) {
    ASSERT_TRUE(streams.bind(stream * 64, Class::kLatency));
  }
  EXPECT_FALSE(streams.bind(7, Class::kLatency));
  streams.unbind(64);
  EXPECT_TRUE(streams.bind(7, Class::kLatency));
}

}  // namespace
}  // namespace cudasched::runtime
