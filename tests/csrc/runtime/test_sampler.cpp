#include <gtest/gtest.h>

#include <memory>

#include "base/clock.hpp"
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

// One launch in flight, which is predicted to take microseconds, and looks at it every millisecond.
class LateLaunch : public ::testing::Test {
 protected:
  struct Beside {
    bool alone = true;
    bool others = false;
  };

  LateLaunch() { launch_.block[0] = launch_.grid[0] = 256; }

  void enter(Beside beside) {
    predicted_ns_ = predict();
    const predict::Prediction prediction = sampler_->predict(query());
    const schedule::Ledger::Entry entry = ledger_->submit(kStream, prediction.duration_ns, true);
    sampler_->entered(entry.segment, prediction, beside.alone, beside.others);
    ledger_->submitted(entry.segment, true);
  }
  void run(std::int64_t ms) {
    for (const std::int64_t end = now_ + ms * kNsPerMs; now_ < end;) {
      now_ += kNsPerMs;
      ledger_->look(now_, true);
      sampler_->observe_late(*ledger_);
    }
  }
  std::int64_t predict() { return sampler_->predictor().estimate_ns(query()); }

  predict::Query query() const { return {launch_, &function_, {}, {4, 132}, false}; }

  static constexpr std::uint64_t kStream = 7;
  std::unique_ptr<Sampler> sampler_ = std::make_unique<Sampler>();
  std::unique_ptr<schedule::Ledger> ledger_ = std::make_unique<schedule::Ledger>();
  predict::Launch launch_;
  predict::Function function_ = [] {
    predict::Function function;
    function.index = 1;
    function.identity = 1'001;
    return function;
  }();
  std::int64_t now_ = kNsPerSecond;
  std::int64_t predicted_ns_ = 0;
};

TEST_F(LateLaunch, IsPredictedToTakeAtLeastWhatItHasRun) {
  run(1);
  enter({});
  ASSERT_LT(predicted_ns_, kNsPerMs);
  run(10);
  // What was said last is at most half of what it has run by now.
  EXPECT_GE(predict(), 5 * kNsPerMs);
  EXPECT_LE(predict(), 12 * kNsPerMs);
  run(90);
  EXPECT_GE(predict(), 50 * kNsPerMs);
  EXPECT_LE(predict(), 110 * kNsPerMs);
}

TEST_F(LateLaunch, ThatRanBesideOthersOrIsNotAloneInItsSegmentTeachesNothing) {
  for (const Beside beside : {Beside{true, true}, Beside{false, false}}) {
    sampler_ = std::make_unique<Sampler>();
    ledger_ = std::make_unique<schedule::Ledger>();
    run(1);
    enter(beside);
    run(100);
    EXPECT_EQ(predict(), predicted_ns_);
  }
}

// Latency work, or a launch that was held and for which it may have waited, has passed.
TEST_F(LateLaunch, TeachesNothingFromAnOverlapOn) {
  run(1);
  enter({});
  sampler_->overlap();
  run(100);
  EXPECT_EQ(predict(), predicted_ns_);
}

TEST_F(LateLaunch, KeepsWhatItHasTaughtBeforeAnOverlap) {
  run(1);
  enter({});
  run(10);
  const std::int64_t learned_ns = predict();
  sampler_->overlap();
  run(90);
  EXPECT_EQ(predict(), learned_ns);
}

}  // namespace
}  // namespace cudasched::runtime
