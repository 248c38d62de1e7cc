// Time slices as the engine keeps them, over the simulated driver: the length of a process's contexts by what it does.
#include <gtest/gtest.h>

#include <string>

#include "hooked_driver.hpp"
#include "other_client.hpp"
#include "preempt/time_slices.hpp"
#include "runtime/engine.hpp"

namespace cudasched::test {
namespace {

using preempt::State;
using runtime::engine;

class SliceKeeperTest : public ::testing::Test {
 protected:
  SliceKeeperTest() { setenv("CUDASCHED_TIME_SLICE_US", "auto", 1); }

  static arbiter::Slot& slot(const Program& program) {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    Program::check(program.launch(1));
    Program::check(program.synchronize());
    auto& table = HookedDriver::instance().table();
    return table.slot(__builtin_ctzll(table.layout().best_effort.load()));
  }
  static bool is(const arbiter::Slot& slot, State state) {
    return slot.time_slice_state.load() == static_cast<std::uint32_t>(state);
  }
};

TEST_F(SliceKeeperTest, BestEffortHasTheShortestUntilTheProcessHasLatencyWorkToo) {
  const Program program;
  const arbiter::Slot& mine = slot(program);
  EXPECT_TRUE(eventually([&] { return is(mine, State::kOn) && mine.time_slice_us.load() == 1; }));
  {
    const InRegion region(CUDASCHED_LATENCY);
    Program::check(program.launch(2, Program::new_stream()));
  }
  EXPECT_TRUE(eventually([&] { return is(mine, State::kShared) && mine.time_slice_us.load() == 0; }));
}

TEST_F(SliceKeeperTest, LatencyWorkHasALongerOneBesideBestEffortAlone) {
  const Program program;
  const InRegion region(CUDASCHED_LATENCY);
  auto& table = HookedDriver::instance().table();
  const auto becomes = [&](State state, std::uint32_t us) {
    return eventually([&] {  // the program goes on, so that it ticks
      Program::check(program.launch(1));
      Program::check(program.synchronize());
      const arbiter::Slot& mine = table.slot(__builtin_ctzll(table.latency_clients()));
      return is(mine, state) && mine.time_slice_us.load() == us;
    });
  };
  const auto idles = [](arbiter::Table&, int) {};
  {
    const OtherClient trains(Class::kBestEffort, "trains", idles);
    EXPECT_TRUE(becomes(State::kOn, 20'000));
    {
      const OtherClient serves(false);
      EXPECT_TRUE(becomes(State::kUnused, 0));
    }
    EXPECT_TRUE(becomes(State::kOn, 20'000));
    trains.stop();
    EXPECT_TRUE(becomes(State::kUnused, 0)) << "a client that is stopped takes no turns";
  }
  const OtherClient trains(Class::kBestEffort, "trains", idles);
  EXPECT_TRUE(becomes(State::kOn, 20'000));
  const InRegion inner(CUDASCHED_BEST_EFFORT);
  Program::check(program.launch(1, Program::new_stream()));
  EXPECT_TRUE(eventually([&] { return is(table.slot(__builtin_ctzll(table.latency_clients())), State::kUnused); }));
}

// Where nothing interrupts it, 30 ms may be in flight: three of these.
TEST_F(SliceKeeperTest, WhatTheGpuInterruptsMayBeInFlightAtAnyLength) {
  const Program program;
  const arbiter::Slot& mine = slot(program);
  ASSERT_TRUE(eventually([&] { return is(mine, State::kOn); }));
  EXPECT_TRUE(eventually([&, before = mine.heartbeat_ns.load()] { return mine.heartbeat_ns.load() != before; }));
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const std::uint64_t before = state().best_effort_launches;
  for (std::uint64_t i = 0; i < 100; ++i) Program::check(program.launch(i, program.stream(), 500));  // 10 ms
  EXPECT_TRUE(eventually([&] { return state().best_effort_launches - before == 100; }));
  EXPECT_LT(program.ran(), 50U);
  Program::check(program.synchronize());
}

TEST_F(SliceKeeperTest, UnderMpsNothingIsSetAndLongKernelsAreWarnedOf) {
  HookedDriver::instance();
  static auto* const real = driver::table().cuDeviceGetAttribute;
  const Replaced mps(
      driver::table().cuDeviceGetAttribute, +[](int* value, CUdevice_attribute what, CUdevice device) {
        if (what != CU_DEVICE_ATTRIBUTE_MPS_ENABLED) return real(value, what, device);
        *value = 1;
        return CUDA_SUCCESS;
      });
  const OtherClient idle(false);
  const Program program;
  ::testing::internal::CaptureStderr();
  const arbiter::Slot& mine = slot(program);
  EXPECT_TRUE(eventually([&] { return is(mine, State::kMps); }));
  EXPECT_EQ(mine.time_slice_us.load(), 0U);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  for (int i = 0; i < 5; ++i) {
    Program::check(program.launch(3, program.stream(), 1'000));  // 20 ms
    Program::check(program.synchronize());
  }
  for (int i = 0; i < 3; ++i) {  // ticks
    EXPECT_TRUE(eventually([&, before = mine.heartbeat_ns.load()] { return mine.heartbeat_ns.load() != before; }));
  }
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("run it without --mps"), std::string::npos);
}

}  // namespace
}  // namespace cudasched::test
