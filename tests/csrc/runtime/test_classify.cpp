#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <unordered_map>

#include "runtime/classify.hpp"

namespace cudasched::runtime {
namespace {

TEST(StreamClassesTest, FindsWhatIsBound) {
  auto streams = std::make_unique<StreamClasses>();
  Class value = Class::kNormal;
  EXPECT_TRUE(streams->empty());
  EXPECT_FALSE(streams->find(0x10, value));
  EXPECT_TRUE(streams->bind(0x10, Class::kLatency));
  EXPECT_TRUE(streams->bind(0x10, Class::kBestEffort));
  ASSERT_TRUE(streams->find(0x10, value));
  EXPECT_EQ(value, Class::kBestEffort);
  streams->unbind(0x10);
  EXPECT_FALSE(streams->find(0x10, value));
  EXPECT_TRUE(streams->empty());
}

TEST(StreamClassesTest, SaysWhenItIsFull) {
  auto streams = std::make_unique<StreamClasses>();
  for (std::uint64_t stream = 1; stream <= StreamClasses::kCapacity; ++stream) {
    ASSERT_TRUE(streams->bind(stream * 64, Class::kLatency));
  }
  EXPECT_FALSE(streams->bind(7, Class::kLatency));
  streams->unbind(64);
  EXPECT_TRUE(streams->bind(7, Class::kLatency));
}

// Streams come and go for days: removed places are used again and lookups stay right.
TEST(StreamClassesTest, AgreesWithAMapUnderChurn) {
  auto streams = std::make_unique<StreamClasses>();
  std::unordered_map<std::uint64_t, Class> model;
  std::mt19937_64 random(5);
  for (int step = 0; step < 300'000; ++step) {
    const std::uint64_t stream = (random() % 400 + 1) * 8;
    const auto value = static_cast<Class>(random() % 3);
    if (random() % 2 == 0) {
      const bool fits = model.contains(stream) || model.size() < StreamClasses::kCapacity;
      ASSERT_EQ(streams->bind(stream, value), fits);
      if (fits) model[stream] = value;
    } else {
      streams->unbind(stream);
      model.erase(stream);
    }
    const std::uint64_t asked = (random() % 400 + 1) * 8;
    Class found = Class::kNormal;
    const auto expected = model.find(asked);
    ASSERT_EQ(streams->find(asked, found), expected != model.end());
    if (expected != model.end()) {
      ASSERT_EQ(found, expected->second);
    }
  }
}

}  // namespace
}  // namespace cudasched::runtime
