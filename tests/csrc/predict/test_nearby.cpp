#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "predict/nearby.hpp"

namespace cudasched::predict {
namespace {

class NearbyTest : public ::testing::Test {
 protected:
  std::unique_ptr<Nearby> nearby_ = std::make_unique<Nearby>();
};

TEST_F(NearbyTest, WithoutAnythingNearTheMeanStands) {
  EXPECT_FLOAT_EQ(nearby_->about(1, std::log(50'000.0F), 0.3F), 0.3F);
  for (int i = 0; i < 20; ++i) nearby_->add(1, std::log(5'000.0F), -0.7F, 1);
  EXPECT_FLOAT_EQ(nearby_->about(1, std::log(50'000.0F), 0.3F), 0.3F);  // another length
  EXPECT_FLOAT_EQ(nearby_->about(2, std::log(5'000.0F), 0.3F), 0.3F);   // another kernel
}

TEST_F(NearbyTest, TellsSizesOfOneKernelApart) {
  for (int i = 0; i < 50; ++i) {
    nearby_->add(1, std::log(5'000.0F), 0.5F, 1);
    nearby_->add(1, std::log(500'000.0F), -0.5F, 1);
  }
  EXPECT_NEAR(nearby_->about(1, std::log(5'000.0F), 0), 0.5F, 0.05F);
  EXPECT_NEAR(nearby_->about(1, std::log(500'000.0F), 0), -0.5F, 0.05F);
}

TEST_F(NearbyTest, CountsTheFartherTheLess) {
  const float base = 10;
  for (int i = 0; i < 4; ++i) nearby_->add(1, base, 1, 1);
  float before = 1;
  for (const float away : {0.0F, Nearby::kBinLog, 2 * Nearby::kBinLog, 3 * Nearby::kBinLog}) {
    for (const float sign : {-1.0F, 1.0F}) {
      const float here = nearby_->about(1, base + sign * away, 0);
      EXPECT_LT(here, before + 1e-6F);
      if (sign > 0) before = here;
    }
  }
  EXPECT_EQ(before, 0);
}

TEST_F(NearbyTest, FollowsWhatHasChanged) {
  for (int i = 0; i < 1'000; ++i) nearby_->add(1, 10, 1, 1);
  for (int i = 0; i < 80; ++i) nearby_->add(1, 10, -1, 1);
  EXPECT_LT(nearby_->about(1, 10, 0), -0.9F);
}

TEST_F(NearbyTest, MoreKernelsThanItHasRoomForLoseWhatTheyHadAndNothingElse) {
  for (std::uint32_t function = 0; function < 20'000; ++function) {
    nearby_->add(function, static_cast<float>(function % 30), 2, 1);
    EXPECT_GT(nearby_->about(function, static_cast<float>(function % 30), 0), 0.9F) << function;
  }
  for (std::uint32_t function = 0; function < 20'000; ++function) {
    const float here = nearby_->about(function, static_cast<float>(function % 30), 0);
    EXPECT_GE(here, 0);
    EXPECT_LE(here, 2);
  }
}

TEST_F(NearbyTest, TakesAnyLength) {
  for (const float base : {-5.0F, 0.0F, 0.01F, 31.9F, 32.0F}) {
    nearby_->add(4'095, base, 0.25F, 1);
    EXPECT_GT(nearby_->about(4'095, base, 0), 0.1F) << base;
  }
  nearby_->clear();
  EXPECT_EQ(nearby_->about(4'095, 0, 0.5F), 0.5F);
}

}  // namespace
}  // namespace cudasched::predict
