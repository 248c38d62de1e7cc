#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <vector>

#include "predict/keys.hpp"

namespace cudasched::predict {
namespace {

class KeysTest : public ::testing::Test {
 protected:
  KeysTest() {
    function_.identity = 7;
    function_.traits.family = static_cast<std::uint8_t>(Family::kElementwise);
  }

  Query query(const std::vector<std::uint32_t>& words) const { return {launch_, &function_, words, {}, false}; }
  std::uint64_t own(const std::vector<std::uint32_t>& words) const {
    return keys_->own(query(words), Keys::geometry_of(launch_));
  }

  std::unique_ptr<Keys> keys_ = std::make_unique<Keys>();
  Launch launch_;
  Function function_;
};

TEST_F(KeysTest, EveryPartOfTheGeometryCounts) {
  std::set<std::uint64_t> seen{Keys::geometry_of(launch_)};
  for (auto* const sides : {&launch_.grid, &launch_.block, &launch_.cluster}) {
    for (std::uint32_t& side : *sides) {
      side = 2;
      EXPECT_TRUE(seen.insert(Keys::geometry_of(launch_)).second);
      side = 1;
    }
  }
  launch_.dynamic_shared_bytes = 1;
  EXPECT_TRUE(seen.insert(Keys::geometry_of(launch_)).second);
}

TEST_F(KeysTest, AKernelWhoseWorkShowsInItsGeometrySharesByTheFirstWord) {
  const std::uint64_t geometry = Keys::geometry_of(launch_);
  EXPECT_TRUE(Keys::may_share(query({100, 0, 3})));
  EXPECT_EQ(keys_->shared(query({100, 0, 3}), geometry), keys_->shared(query({100, 0, 4}), geometry));
  EXPECT_NE(keys_->shared(query({100, 0, 3}), geometry), keys_->shared(query({101, 0, 3}), geometry));
  EXPECT_NE(own({100, 0, 3}), own({100, 0, 4}));
  EXPECT_FALSE(Keys::may_share(query({})));
  function_.traits.tile[0] = 128;
  EXPECT_FALSE(Keys::may_share(query({100, 0, 3})));
  function_.traits.tile[0] = 0;
  function_.traits.family = static_cast<std::uint8_t>(Family::kGemm);
  EXPECT_FALSE(Keys::may_share(query({100, 0, 3})));
}

TEST_F(KeysTest, OfAKernelWithoutWordsItsShapeIsTheKey) {
  const std::uint64_t before = own({});
  EXPECT_NE(before, 0U);
  launch_.grid[0] = 2;
  EXPECT_NE(own({}), before);
  launch_.grid[0] = 1;
  function_.identity = 8;
  EXPECT_NE(own({}), before);
}

TEST_F(KeysTest, AGraphIsItsHandleAndItsCriticalPath) {
  EXPECT_NE(Keys::of_graph(nullptr, 0), 0U);
  EXPECT_NE(Keys::of_graph(&launch_, 0), Keys::of_graph(&function_, 0));
  EXPECT_NE(Keys::of_graph(&launch_, 0), Keys::of_graph(&launch_, 1'000));
}

}  // namespace
}  // namespace cudasched::predict
