#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "base/error.hpp"
#include "predict/corrections.hpp"

namespace cudasched::predict {
namespace {

Function function(std::uint32_t index, std::uint32_t library = 1) {
  Function made;
  made.index = index;
  made.identity = 100 + index;
  made.traits.library = library;
  return made;
}

class CorrectionsTest : public ::testing::Test {
 protected:
  void teach(std::uint32_t index, float log_ratio, int samples = 20, float noise = 0) {
    corrections_->meet(function(index));
    for (int i = 0; i < samples; ++i) corrections_->add(index, 10, log_ratio, noise);
  }

  std::vector<std::byte> saved() const {
    StateWriter out;
    corrections_->save(out);
    return std::move(out).finish();
  }

  std::unique_ptr<Corrections> corrections_ = std::make_unique<Corrections>();
};

TEST_F(CorrectionsTest, AKernelIsCorrectedByWhatItsFirstLaunchesWereWrongBy) {
  EXPECT_EQ(corrections_->log(3, 10), 0);
  teach(3, 1);
  EXPECT_NEAR(corrections_->mean_log(3), 1, 0.15);
  EXPECT_NEAR(corrections_->log(3, 10), 1, 0.1);
  EXPECT_EQ(corrections_->log(4, 10), 0);
}

// The mean over all sizes stands in for them.
TEST_F(CorrectionsTest, NoisySamplesSayLittleOfLaunchesNearby) {
  teach(3, 1, 1);
  teach(4, 1, 1, 0.4F);
  const float sure = corrections_->log(3, 10) - corrections_->mean_log(3);
  const float unsure = corrections_->log(4, 10) - corrections_->mean_log(4);
  EXPECT_GT(sure, 0);
  EXPECT_LT(unsure, 0.5F * sure);
}

// Kernels that agree speak for the next one of their library; one or two do not.
TEST_F(CorrectionsTest, ANewKernelIsCorrectedByItsLibraryAsFarAsThatAgrees) {
  teach(1, 1, 1);
  teach(2, 1, 1);
  corrections_->meet(function(8));
  EXPECT_EQ(corrections_->log(8, 10), 0);
  teach(3, 1, 1);
  EXPECT_NEAR(corrections_->log(8, 10), 1, 0.01);
  corrections_->meet(function(9, 2));
  EXPECT_EQ(corrections_->log(9, 10), 0) << "of another library";
}

TEST_F(CorrectionsTest, GraphsOfAnUnknownCriticalPathAreNotCorrected) {
  corrections_->add(Corrections::kUncorrected, 10, 2, 0);
  EXPECT_EQ(corrections_->log(Corrections::kUncorrected, 10), 0);
  corrections_->add(Corrections::kGraphs, 10, 2, 0);
  EXPECT_GT(corrections_->log(Corrections::kGraphs, 10), 0);
  EXPECT_EQ(Corrections::index_of(nullptr), Corrections::kNameless);
}

TEST_F(CorrectionsTest, MeansAreKeptByIdentityUnlessTheBaseIsAnother) {
  teach(1, 1);
  const std::vector<std::byte> state = saved();
  for (const bool same_base : {true, false}) {
    StateReader in(state);
    const auto next = std::make_unique<Corrections>();
    next->restore(in, same_base);
    in.finish();
    Function met = function(1);
    met.index = 40;  // another number in this run
    next->meet(met);
    EXPECT_NEAR(next->mean_log(40), same_base ? corrections_->mean_log(1) : 0, 1e-6);
  }
}

TEST_F(CorrectionsTest, WhatIsOutOfRangeIsRefused) {
  StateWriter out;
  out.put(std::uint32_t{1});
  out.put(2 * Corrections::kMostRatio);
  const std::vector<std::byte> state = std::move(out).finish();
  StateReader in(state);
  EXPECT_THROW(corrections_->restore(in, true), StateError);
}

}  // namespace
}  // namespace cudasched::predict
