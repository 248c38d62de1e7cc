// Under `harvest` and `slack`: what a latency client tells of its requests, and what a gate makes of what others tell.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <optional>
#include <thread>

#include "../hooked_driver.hpp"
#include "../other_client.hpp"
#include "runtime/engine.hpp"
#include "runtime/hot.hpp"
#include "schedule/segment_profile.hpp"

namespace cudasched::test {
namespace {

using schedule::TimeLeft;

class SegmentsTest : public ::testing::Test {
 protected:
  explicit SegmentsTest(const char* policy = "harvest") : driver_(under(policy)) {}

  static HookedDriver& under(const char* policy) {
    setenv("CUDASCHED_POLICY", policy, 1);
    return HookedDriver::instance();
  }

  const arbiter::Slot& latency_slot() {
    int slot = -1;
    runtime::engine().for_each_device([&](runtime::Device& device) { slot = device.slot(Class::kLatency); });
    return driver_.table().layout().slots[static_cast<std::size_t>(slot)];
  }

  // A request of two parts, each of so many launches and a wait.
  void serve(int launches) {
    const InRegion region(CUDASCHED_LATENCY, 500);
    for (int part = 0; part < 2; ++part) {
      for (int i = 0; i < launches; ++i) {
        Program::check(program_.launch(1, program_.stream(), 20));
        std::this_thread::sleep_for(100us);
      }
      wait();
    }
  }

  // Launches are many here, and the log that they write has not room for all.
  void wait() {
    Program::check(program_.synchronize());
    *program_.log() = 0;
  }

  std::uint64_t submitted() const { return state().best_effort_launches - before_; }

  void serve_the_gaps_of_another();

  HookedDriver& driver_;
  Program program_;
  std::uint64_t before_ = state().best_effort_launches;
};

class SegmentsUnderSlackTest : public SegmentsTest {
 protected:
  SegmentsUnderSlackTest() : SegmentsTest("slack") {}
};

TEST_F(SegmentsTest, AClientTellsWhatIsLeftOfItsRequestOnceItKnows) {
  std::optional<TimeLeft> at_begin;
  std::optional<TimeLeft> after_three;
  std::int64_t late_ns = 0;
  // One segment of 17 is kept clean, and a busy machine may surprise: then it takes many of them.
  const auto told = [&] {
    serve(12);
    const InRegion region(CUDASCHED_LATENCY, 500);
    late_ns = latency_slot().segment_late_ns.load();
    at_begin = schedule::unpack(latency_slot().segment_left.load());
    for (int launch = 0; launch < 12; ++launch) {
      Program::check(program_.launch(1, program_.stream(), 20));
      std::this_thread::sleep_for(100us);
      if (launch == 2) after_three = schedule::unpack(latency_slot().segment_left.load());
    }
    wait();
    return at_begin && at_begin->host_ns > 0 && after_three;
  };
  ASSERT_TRUE(eventually(told));
  EXPECT_GT(late_ns, 0);
  EXPECT_GT(at_begin->gpu_ns, after_three->gpu_ns);
  EXPECT_GT(at_begin->host_ns, after_three->host_ns);
  EXPECT_GT(after_three->gpu_ns, 0);
  EXPECT_GE(at_begin->host_ns, 11 * 100'000);
  EXPECT_GT(latency_slot().latency_gpu_ns.load(), 0);
}

// Requests of two models in turn, with one target: their names tell them apart.
TEST_F(SegmentsTest, RegionsOfTwoNamesAreLearnedEachByItself) {
  const auto request = [&](const char* name, int launches) {
    const InRegion region(CUDASCHED_LATENCY, 500, name);
    const bool known = latency_slot().segment_late_ns.load() > 0;
    for (int i = 0; i < launches; ++i) {
      Program::check(program_.launch(1, program_.stream(), 20));
      std::this_thread::sleep_for(100us);
    }
    wait();
    return known;
  };
  EXPECT_TRUE(eventually([&] {
    const bool small = request("small", 6);
    return request("large", 40) && small;
  }));
}

TEST_F(SegmentsTest, AWaitBeginsTheNextSegmentAndAQueryDoesNot) {
  serve(3);
  const InRegion region(CUDASCHED_LATENCY, 500);
  const std::uint64_t first = latency_slot().segment.load();
  Program::check(program_.launch(1));
  const auto query = call<CUresult(CUstream)>("cuStreamQuery");
  while (query(program_.stream()) != CUDA_SUCCESS) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(latency_slot().segment.load(), first);
  Program::check(program_.launch(1));
  Program::check(program_.synchronize());
  EXPECT_EQ(latency_slot().segment.load(), first + 1);
  Program::check(program_.synchronize());
  EXPECT_EQ(latency_slot().segment.load(), first + 1) << "nothing was launched since";
  // What another thread waits for, best effort of this process for one, is not this request's.
  Program::check(program_.launch(1));
  std::thread([&] {
    program_.use_on_this_thread();
    Program::check(program_.synchronize());
  }).join();
  EXPECT_EQ(latency_slot().segment.load(), first + 1);
}

// There were timers for 585 of them.
TEST_F(SegmentsTest, ASegmentOfManyLaunchesIsKnown) {
  EXPECT_TRUE(eventually([&] {
    const InRegion region(CUDASCHED_LATENCY, 500);
    const bool known = latency_slot().segment_late_ns.load() > 0;
    for (int i = 0; i < 640; ++i) Program::check(program_.launch(1));
    wait();
    return known;
  }));
}

TEST_F(SegmentsTest, MarksSayHowFarTheGpuIsWithASegmentOnOneStream) {
  CUstream const other = Program::new_stream();
  std::int64_t done = 0;
  std::int64_t not_done = 0;
  std::int64_t submitted = 0;
  // What was seen of a request before its wait, from its beginning on; 0 while it is not known.
  const auto look = [&](bool two_streams) {
    const InRegion region(CUDASCHED_LATENCY, 500);
    const std::int64_t begin = latency_slot().latency_gpu_ns.load();
    const bool known = latency_slot().segment_late_ns.load() > 0;
    for (int launch = 0; launch < 40; ++launch) {
      CUstream const stream = two_streams && launch % 2 == 1 ? other : program_.stream();
      Program::check(program_.launch(1, stream, 20));
      std::this_thread::sleep_for(100us);
    }
    done = latency_slot().latency_done_ns.load() - begin;
    not_done = latency_slot().latency_not_done_ns.load() - begin;
    submitted = latency_slot().latency_gpu_ns.load() - begin;
    wait();
    Program::check(program_.synchronize(other));
    return known;
  };
  EXPECT_TRUE(eventually([&] { return look(false) && done > 0; }));
  EXPECT_LT(done, submitted);
  EXPECT_GE(not_done, done);
  EXPECT_LE(not_done, submitted);
  ASSERT_TRUE(eventually([&] { return look(true); }));
  EXPECT_EQ(done, 0) << "an event of one stream says nothing of the other";
}

TEST_F(SegmentsTest, AfterAWaitTheHostBacksOffAnew) {
  runtime::HostBackoff& host_backoff = runtime::hot().host_backoff;
  host_backoff.configure(50'000'000, /*while_fed=*/false);
  const InRegion region(CUDASCHED_LATENCY, 500);
  std::atomic<std::uint64_t> backed_off{0};
  const auto best_effort = [&] { std::thread([&] { host_backoff.back_off(backed_off, nullptr); }).join(); };
  std::this_thread::sleep_for(60ms);
  best_effort();
  EXPECT_EQ(backed_off, 0u) << "the bound is over";
  EXPECT_TRUE(eventually([&] {
    Program::check(program_.launch(1));
    Program::check(program_.synchronize());
    best_effort();
    return backed_off > 0;
  }));
  host_backoff.configure(runtime::Settings::kHarvestBackoffNs, /*while_fed=*/true);
}

// Its timing events go with it, before the driver takes them away, and are made anew.
TEST_F(SegmentsTest, AContextThatGoesTakesNothingElseAlong) {
  for (int i = 0; i < 12; ++i) serve(6);
  CUcontext other = nullptr;
  Program::check(call<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&other, 0, 0));
  Program::check(call<CUresult(CUcontext)>("cuCtxDestroy_v2")(other));
  program_.use_on_this_thread();
  const std::uint64_t before = latency_slot().segment.load();
  EXPECT_TRUE(eventually([&] {
    serve(6);
    const InRegion region(CUDASCHED_LATENCY, 500);
    const std::optional<TimeLeft> left = schedule::unpack(latency_slot().segment_left.load());
    return left && left->gpu_ns > 0;
  }));
  EXPECT_GT(latency_slot().segment.load(), before);
  EXPECT_EQ(state().scheduling, 1);
}

// Another process's client, whose words this test writes.
void SegmentsTest::serve_the_gaps_of_another() {
  constexpr std::int64_t kSecond = 1'000'000'000;
  const OtherClient other(/*active=*/true);
  arbiter::Slot& told = driver_.table().slot(other.slot());
  told.segment = 1;
  told.segment_since_ns = now_ns();
  told.segment_median_ns = 1'000 * kSecond;
  told.segment_left = schedule::pack({kSecond, 200 * kSecond});
  told.segment_late_ns = 1'000;
  const InRegion region(CUDASCHED_BEST_EFFORT);
  for (std::uint64_t i = 0; i < 20; ++i) Program::check(program_.launch(i));
  EXPECT_TRUE(eventually([&] { return program_.ran() == 20; })) << "the request is active all the while";
  // The host comes to its wait: from now on the segment has the GPU for itself.
  told.segment_left = schedule::pack({250 * kSecond, 200 * kSecond});
  const std::uint64_t before = submitted();
  for (std::uint64_t i = 0; i < 20; ++i) Program::check(program_.launch(i));
  EXPECT_TRUE(eventually(someone_waits));
  std::this_thread::sleep_for(20ms);
  EXPECT_LE(submitted(), before + 1);
  // The next one leaves enough.
  told.segment = 2;
  told.segment_left = schedule::pack({kSecond, 200 * kSecond});
  driver_.table().wake_all();
  EXPECT_TRUE(eventually([&] { return program_.ran() == 40; }));
  // One that says nothing is as under strict, to its end.
  told.segment = 3;
  told.segment_late_ns = 0;
  for (std::uint64_t i = 0; i < 20; ++i) Program::check(program_.launch(i));
  EXPECT_TRUE(eventually(someone_waits));
  std::this_thread::sleep_for(20ms);
  EXPECT_LE(program_.ran(), 41u);
  driver_.table().clear_active(other.slot());
  driver_.table().layout().active = 0;
  driver_.table().wake_all();
  EXPECT_TRUE(eventually([&] { return program_.ran() == 60; }));
}

TEST_F(SegmentsTest, BestEffortRunsInTheGapsOfARequestAndNoLongerThanTheyLast) { serve_the_gaps_of_another(); }

TEST_F(SegmentsUnderSlackTest, BestEffortRunsInTheGapsOfARequestAndNoLongerThanTheyLast) {
  serve_the_gaps_of_another();
}

TEST_F(SegmentsUnderSlackTest, OnlyRequestsWithATargetThatLeavesThemSlackAreToldOf) {
  const auto told = [&](double slo_ms) {
    const InRegion region(CUDASCHED_LATENCY, slo_ms);
    const bool known = latency_slot().segment_late_ns.load() > 0;
    for (int i = 0; i < 12; ++i) {
      Program::check(program_.launch(1, program_.stream(), 20));
      std::this_thread::sleep_for(1ms);
    }
    wait();
    return known;
  };
  EXPECT_TRUE(eventually([&] { return told(500); }));
  for (int i = 0; i < 20; ++i) {
    EXPECT_FALSE(told(0)) << "there is no slack without a target";
    EXPECT_FALSE(told(2)) << "its host alone takes longer";
  }
  EXPECT_EQ(state().scheduling, 1);
}

}  // namespace
}  // namespace cudasched::test
