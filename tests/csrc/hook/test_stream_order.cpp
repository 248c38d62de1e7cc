// cudasched_order: a stream after what others have now, by an event only where there is something to wait for.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>

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
    Program::check(driver_.function<CUresult(CUstream*, unsigned)>("cuStreamCreate")(&blocking_, CU_STREAM_DEFAULT));
    const InRegion region(CUDASCHED_BEST_EFFORT);  // its next ones are deferred
    for (CUstream stream : {program_.stream(), other_, blocking_}) {
      for (std::uint64_t i = 0; i < 2; ++i) Program::check(program_.launch(0, stream));
      Program::check(program_.synchronize(stream));
    }
    began_ = program_.ran();
    EXPECT_EQ(cudasched_new_event(&event_), CUDASCHED_OK) << cudasched_last_error();
  }

  int order_after(CUstream other, std::uint64_t event) {
    const cudasched_ahead ahead{number(other), event};
    return cudasched_order(number(program_.stream()), &ahead, 1);
  }
  static bool is_idle(CUstream stream) {
    std::int32_t idle = -1;
    EXPECT_EQ(cudasched_is_idle(number(stream), &idle), CUDASCHED_OK) << cudasched_last_error();
    return idle != 0;
  }

  // After 1 was launched and an order was made.
  void expect_two_behind_it() {
    Program::check(program_.launch(2));
    EXPECT_EQ(program_.ran(), began_) << "the host has waited";
    expect_in_order();
  }

  void expect_in_order() {
    for (CUstream stream : {program_.stream(), other_, blocking_}) Program::check(program_.synchronize(stream));
    ASSERT_EQ(program_.ran(), began_ + 2);
    EXPECT_EQ(program_.value(began_), 1U);
    EXPECT_EQ(program_.value(began_ + 1), 2U);
  }

  HookedDriver& driver_ = HookedDriver::instance();
  Program program_;
  CUstream other_;
  CUstream blocking_ = nullptr;
  std::uint64_t event_ = 0;
  std::uint64_t began_ = 0;
};

TEST_F(StreamOrder, WorkThatIsUnderWayIsWaitedForOnTheGpu) {
  for (CUstream stream : {other_, CUstream{nullptr}, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD}) {
    began_ = program_.ran();
    Program::check(program_.launch(1, stream, 10'000));
    EXPECT_EQ(order_after(stream, kNoEvent), CUDASCHED_DRIVER_ERROR) << number(stream);
    EXPECT_NE(std::string(cudasched_last_error()).find("cuEventRecord"), std::string::npos) << cudasched_last_error();
    EXPECT_FALSE(is_idle(stream));
    ASSERT_EQ(order_after(stream, event_), CUDASCHED_OK);
    expect_two_behind_it();
  }
}

// The default stream is asked about the blocking streams, too.
TEST_F(StreamOrder, BlockingStreamsComeBeforeTheDefaultStream) {
  Program::check(program_.launch(1, blocking_, 10'000));
  EXPECT_FALSE(is_idle(nullptr));
  ASSERT_EQ(order_after(nullptr, event_), CUDASCHED_OK);
  expect_two_behind_it();
}

TEST_F(StreamOrder, WhatIsCompleteCostsNoEvent) {
  for (CUstream stream : {other_, blocking_, CUstream{nullptr}, CU_STREAM_LEGACY}) {
    EXPECT_EQ(order_after(stream, kNoEvent), CUDASCHED_OK) << number(stream) << ": " << cudasched_last_error();
    EXPECT_TRUE(is_idle(stream));
  }
  Program::check(program_.launch(1, other_, 10'000));
  EXPECT_TRUE(is_idle(nullptr)) << "a non-blocking stream is none of the default stream's";
  EXPECT_EQ(order_after(CU_STREAM_PER_THREAD, kNoEvent), CUDASCHED_DRIVER_ERROR);
}

TEST_F(StreamOrder, OfSeveralStreamsEachThatIsBusyIsWaitedFor) {
  Program::check(program_.launch(1, blocking_, 10'000));
  const std::array<cudasched_ahead, 2> ahead{{{number(other_), kNoEvent}, {number(blocking_), event_}}};
  ASSERT_EQ(cudasched_order(number(program_.stream()), ahead.data(), ahead.size()), CUDASCHED_OK);
  expect_two_behind_it();
}

// A query is forbidden while another thread captures, and what it says then says nothing of the capture.
TEST_F(StreamOrder, NothingIsAskedWhileAStreamIsCaptured) {
  auto* const begin = driver_.function<decltype(cuStreamBeginCapture)>("cuStreamBeginCapture_v2");
  auto* const end = driver_.function<decltype(cuStreamEndCapture)>("cuStreamEndCapture");
  const CUstream captured = Program::new_stream();
  Program::check(begin(captured, CU_STREAM_CAPTURE_MODE_GLOBAL));
  for (CUstream stream : {other_, CUstream{nullptr}}) {
    EXPECT_EQ(order_after(stream, kNoEvent), CUDASCHED_DRIVER_ERROR);
    EXPECT_EQ(order_after(stream, event_), CUDASCHED_OK);
    EXPECT_FALSE(is_idle(stream));
  }
  CUgraph graph = nullptr;
  EXPECT_EQ(end(captured, &graph), CUDA_SUCCESS);
  EXPECT_TRUE(is_idle(nullptr));
}

TEST_F(StreamOrder, WhatIsQueuedIsWaitedForAndTheHostGoesOn) {
  // Of the default stream's own streams, what is queued for a blocking one.
  for (const auto& [launched, asked] : {std::pair{other_, other_}, std::pair{blocking_, CUstream{nullptr}}}) {
    began_ = program_.ran();
    OtherClient latency(/*active=*/true);
    const InRegion region(CUDASCHED_BEST_EFFORT);
    Program::check(program_.launch(1, launched));
    EXPECT_FALSE(is_idle(asked));
    EXPECT_EQ(order_after(asked, event_), CUDASCHED_OK);
    Program::check(program_.launch(2));
    EXPECT_EQ(program_.ran(), began_) << "it has opened the gate";
    latency.kill();
    ASSERT_TRUE(eventually([&] { return program_.ran() == began_ + 2; }));
    expect_in_order();
  }
}

}  // namespace
}  // namespace cudasched::test
