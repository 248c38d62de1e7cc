// When a latency client is active: by ticks of the test's own clock, over streams of the simulated driver.
#include "arbiter/processes.hpp"
#include "runtime/hooked_driver.hpp"
#include "runtime/latency/latency_activity.hpp"

namespace cudasched::runtime {
namespace {

class LatencyActivityTest : public arbiter::testing::TableTest {
 protected:
  void SetUp() override {
    table_ = open();
    arbiter::ClientInfo client;
    client.client_class = Class::kLatency;
    slot_ = table_->claim(client);
    activity_.register_client(table_.get(), slot_, settings_, /*mps=*/true);
  }

  bool active() const { return (table_->active() >> slot_ & 1) != 0; }
  void launch() {
    activity_.before_launch();
    activity_.after_launch(program_.stream(), thread_);
  }
  bool active_after_tick() {
    activity_.tick(now_ += kNsPerMs);
    return active();
  }

  test::Program program_;
  Settings settings_;
  std::unique_ptr<arbiter::Table> table_;
  int slot_ = -1;
  ThreadState thread_;
  LatencyActivity activity_;
  std::int64_t now_ = now_ns();
};

// Its input is on the GPU, and what reads it is still on its way: the streams are idle.
TEST_F(LatencyActivityTest, TheTickerLeavesAloneWhatWasLaunchedSinceItsLastTick) {
  for (int i = 0; i < 3; ++i) {
    launch();
    EXPECT_TRUE(active_after_tick()) << i;
    launch();
    EXPECT_TRUE(active_after_tick()) << i;
    activity_.on_synchronised();
    EXPECT_FALSE(active()) << i;
  }
  launch();
  EXPECT_TRUE(active_after_tick());
  EXPECT_FALSE(active_after_tick()) << "nobody waited for it";
}

TEST_F(LatencyActivityTest, WhereOnlyTheTickerFindsTheEndItDoesSoAtOnce) {
  launch();
  EXPECT_TRUE(active_after_tick());
  EXPECT_FALSE(active_after_tick());
  for (int i = 0; i < 10; ++i) {
    launch();
    EXPECT_FALSE(active_after_tick()) << i;
  }
  launch();
  activity_.on_synchronised();
  launch();
  EXPECT_TRUE(active_after_tick()) << "it does end its requests itself";
}

TEST_F(LatencyActivityTest, OneThatGoesOnLaunchingIsLeftAloneForAWhileOnly) {
  for (int i = 0; i < 50; ++i) {
    launch();
    EXPECT_TRUE(active_after_tick()) << i;
  }
  now_ = now_ns() + 100 * kNsPerMs;  // it became active at a time of the real clock
  launch();
  EXPECT_FALSE(active_after_tick());
}

TEST_F(LatencyActivityTest, ARequestThatFollowsRightBehindAnotherIsNotTakenForIt) {
  launch();
  EXPECT_TRUE(active_after_tick());
  activity_.on_synchronised();
  EXPECT_FALSE(active());
  activity_.before_launch();
  activity_.launch_refused();  // so that it counts for nothing
  EXPECT_TRUE(active_after_tick());
  EXPECT_FALSE(active_after_tick());
}

TEST_F(LatencyActivityTest, NobodyEndsItInTheMiddleOfALaunch) {
  launch();
  active_after_tick();
  now_ += 8 * kNsPerMs;  // its kernel ran, and the next launch is under way when that is found
  activity_.before_launch();
  for (int i = 0; i < 3; ++i) {
    activity_.on_synchronised();
    EXPECT_TRUE(active()) << i;
    EXPECT_TRUE(active_after_tick()) << i;
  }
  activity_.launch_refused();
  activity_.on_synchronised();
  EXPECT_FALSE(active());
}

// The ticker stays awake for it.
TEST_F(LatencyActivityTest, ItIsImminentWhileAHintHolds) {
  EXPECT_FALSE(activity_.imminent(now_));
  activity_.expect(kNsPerMs);
  EXPECT_TRUE(activity_.imminent(now_));
  EXPECT_FALSE(activity_.active());
  EXPECT_FALSE(activity_.imminent(now_ns() + 2 * kNsPerMs));
}

// As of a thread that was ended within the driver, whatever the others do.
TEST_F(LatencyActivityTest, ALaunchThatNeverReturnsHoldsItUntilItLapses) {
  activity_.before_launch();
  EXPECT_TRUE(active_after_tick());
  const auto ticks = static_cast<int>(settings_.max_idle_hold_ns / kNsPerMs);
  for (int i = 0; i < ticks; ++i) {
    activity_.before_launch();
    activity_.launch_refused();
    EXPECT_TRUE(active_after_tick()) << i;
  }
  EXPECT_FALSE(active_after_tick());
}

}  // namespace
}  // namespace cudasched::runtime
