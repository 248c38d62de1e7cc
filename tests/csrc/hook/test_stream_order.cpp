// cudasched_order: one stream after what another one has now, by an event only where there is something to wait for.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "hook/intercept.hpp"
#include "runtime/engine.hpp"
#include "runtime/hooked_driver.hpp"
#include "runtime/other_client.hpp"

namespace cudasched::test {
namespace {

constexpr std::uint64_t kNoEvent = 0;  // the driver refuses to record it

std::uint64_t number(CUstream stream) { return reinterpret_cast<std::uint64_t>(stream); }

class StreamOrder : public ::testing::Test {
 protected:
  StreamOrder() : other_(Program::new_stream()) {
    const InRegion region(CUDASCHED_BEST_EFFORT);  // its next ones are deferred
    for (CUstream stream : {program_.stream(), other_}) {
      for (std::uint64_t i = 0; i < 2; ++i) Program::check(program_.launch(0, stream));
      Program::check(program_.synchronize(stream));
    }
    began_ = program_.ran();
    EXPECT_EQ(cudasched_new_event(&event_), CUDASCHED_OK) << cudasched_last_error();
  }

  void expect_in_order() {
    Program::check(program_.synchronize());
    Program::check(program_.synchronize(other_));
    ASSERT_EQ(program_.ran(), began_ + 2);
    EXPECT_EQ(program_.value(began_), 1U);
    EXPECT_EQ(program_.value(began_ + 1), 2U);
  }

  HookedDriver& driver_ = HookedDriver::instance();
  Program program_;
  CUstream other_;
  std::uint64_t event_ = 0;
  std::uint64_t began_ = 0;
};

TEST_F(StreamOrder, WorkThatIsUnderWayIsWaitedForOnTheGpu) {
  Program::check(program_.launch(1, other_, 50'000));
  ASSERT_EQ(cudasched_order(number(program_.stream()), number(other_), event_), CUDASCHED_OK);
  Program::check(program_.launch(2));
  EXPECT_EQ(program_.ran(), began_) << "the host has waited";
  expect_in_order();
}

TEST_F(StreamOrder, WhatIsCompleteCostsNoEvent) {
  EXPECT_EQ(cudasched_order(number(program_.stream()), number(other_), kNoEvent), CUDASCHED_OK);
  EXPECT_EQ(cudasched_order(number(program_.stream()), 0, kNoEvent), CUDASCHED_DRIVER_ERROR)
      << "a default stream has others' work before it";
  Program::check(program_.launch(1, other_, 50'000));
  EXPECT_EQ(cudasched_order(number(program_.stream()), number(other_), kNoEvent), CUDASCHED_DRIVER_ERROR);
  EXPECT_NE(std::string(cudasched_last_error()).find("cuEventRecord"), std::string::npos) << cudasched_last_error();
}

// A query is forbidden while another thread captures, and what it says then says nothing of the capture.
TEST_F(StreamOrder, NothingIsAskedWhileAStreamIsCaptured) {
  auto* const begin = driver_.function<decltype(cuStreamBeginCapture)>("cuStreamBeginCapture_v2");
  auto* const end = driver_.function<decltype(cuStreamEndCapture)>("cuStreamEndCapture");
  const CUstream captured = Program::new_stream();
  Program::check(begin(captured, CU_STREAM_CAPTURE_MODE_GLOBAL));
  EXPECT_EQ(cudasched_order(number(program_.stream()), number(other_), kNoEvent), CUDASCHED_DRIVER_ERROR);
  EXPECT_EQ(cudasched_order(number(program_.stream()), number(other_), event_), CUDASCHED_OK);
  CUgraph graph = nullptr;
  EXPECT_EQ(end(captured, &graph), CUDA_SUCCESS);
}

TEST_F(StreamOrder, WhatIsQueuedIsWaitedForAndTheHostGoesOn) {
  OtherClient latency(/*active=*/true);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  Program::check(program_.launch(1, other_));
  EXPECT_EQ(cudasched_order(number(program_.stream()), number(other_), event_), CUDASCHED_OK);
  Program::check(program_.launch(2));
  EXPECT_EQ(program_.ran(), began_) << "it has opened the gate";
  latency.kill();
  ASSERT_TRUE(eventually([&] { return program_.ran() == began_ + 2; }));
  expect_in_order();
}

}  // namespace
}  // namespace cudasched::test
