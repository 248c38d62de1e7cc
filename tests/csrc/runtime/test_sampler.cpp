#include <gtest/gtest.h>

#include <memory>

#include "runtime/gate/sampler.hpp"

namespace cudasched::runtime {
namespace {

// Each sample costs launches that may overlap their overlap: it is taken always until they are known, and seldom then.
TEST(SamplerTest, KnownLaunchesThatMayOverlapAreTimedSeldom) {
  const auto sampler = std::make_unique<Sampler>();
  queue::Call call;
  predict::Prediction prediction;
  const auto timed_of_64 = [&] {
    int timed = 0;
    for (int i = 0; i < 64; ++i) timed += sampler->times(call, prediction) ? 1 : 0;
    return timed;
  };
  prediction.wants_sample = true;
  prediction.knowledge = predict::Knowledge::kKnown;
  EXPECT_EQ(timed_of_64(), 64);
  call.meaning.overlaps_predecessor = true;
  EXPECT_EQ(timed_of_64(), 16);
  prediction.knowledge = predict::Knowledge::kYoung;
  EXPECT_EQ(timed_of_64(), 64);
  prediction.wants_sample = false;
  EXPECT_EQ(timed_of_64(), 0);
  prediction.wants_sample = true;
  call.always_direct = true;
  EXPECT_EQ(timed_of_64(), 0);
}

}  // namespace
}  // namespace cudasched::runtime
