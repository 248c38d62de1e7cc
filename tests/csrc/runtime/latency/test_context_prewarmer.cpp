// Who says ahead that work comes has the GPU in its context by then; over the simulated driver.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "runtime/hooked_driver.hpp"

namespace cudasched::test {
namespace {

using namespace std::chrono_literals;

constinit std::atomic<int> fills = 0;
constinit decltype(cuMemsetD32Async)* real_fill = nullptr;

class ContextPrewarmer : public ::testing::Test {
 protected:
  ContextPrewarmer() {
    fills = 0;
    real_fill = driver::table().cuMemsetD32Async;
    driver::table().cuMemsetD32Async = +[](CUdeviceptr to, unsigned value, std::size_t count, CUstream stream) {
      ++fills;
      return real_fill(to, value, count, stream);
    };
  }

  ~ContextPrewarmer() override {
    driver::table().cuMemsetD32Async = real_fill;
    if (other_ >= 0) HookedDriver::instance().table().release(other_);
  }

  // A best-effort client of another process, as far as the table shows.
  void somebody_trains() {
    arbiter::ClientInfo client;
    client.client_class = Class::kBestEffort;
    client.name = "train";
    other_ = HookedDriver::instance().table().claim(client);
  }

  void request(std::chrono::milliseconds prepared_for) {
    std::uint64_t token = 0;
    ASSERT_EQ(cudasched_region_enter(CUDASCHED_LATENCY, 0, 0, &token), CUDASCHED_OK);
    std::this_thread::sleep_for(prepared_for);
    Program::check(program_.launch(1, program_.stream()));
    program_.synchronize();
    ASSERT_EQ(cudasched_region_exit(token), CUDASCHED_OK);
  }

  Program program_;
  int other_ = -1;
};

TEST_F(ContextPrewarmer, RunsAtTheEntryOfRegionsInWhichRequestsArePrepared) {
  somebody_trains();
  request(5ms);  // which is how it is known
  EXPECT_EQ(fills, 0);
  request(5ms);
  EXPECT_EQ(fills, 1);
  // Once launches follow at once again, it is no longer worth it.
  for (int i = 0; i < 20; ++i) request(0ms);
  const int before = fills;
  request(0ms);
  EXPECT_EQ(fills, before);
}

TEST_F(ContextPrewarmer, RunsForAHint) {
  somebody_trains();
  ASSERT_EQ(cudasched_expect(1), CUDASCHED_OK);
  EXPECT_EQ(fills, 1);
}

// Where the machine is so busy that a rhythm does not hold, a slower one does.
TEST_F(ContextPrewarmer, RunsAheadOfTheNextRequestOfARhythm) {
  somebody_trains();
  for (auto period = 50ms; fills == 0 && period < 5s; period *= 3) {
    auto due = std::chrono::steady_clock::now();
    for (int i = 0; i < 20 && fills == 0; ++i) {
      std::this_thread::sleep_until(due += period);
      request(0ms);
    }
  }
  EXPECT_GT(fills, 0);
}

TEST_F(ContextPrewarmer, DoesNothingWhereNoOtherProcessWorks) {
  ASSERT_EQ(cudasched_expect(1), CUDASCHED_OK);
  for (int i = 0; i < 3; ++i) request(5ms);
  EXPECT_EQ(fills, 0);
}

TEST_F(ContextPrewarmer, DoesNothingWhileAStreamIsCaptured) {
  somebody_trains();
  const auto begin = call<CUresult(CUstream, CUstreamCaptureMode)>("cuStreamBeginCapture_v2");
  const auto end = call<CUresult(CUstream, CUgraph*)>("cuStreamEndCapture");
  const CUstream stream = Program::new_stream();
  CUgraph graph = nullptr;
  Program::check(begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  ASSERT_EQ(cudasched_expect(1), CUDASCHED_OK);
  Program::check(end(stream, &graph));
  EXPECT_EQ(fills, 0);
  ASSERT_EQ(cudasched_expect(1), CUDASCHED_OK);
  EXPECT_EQ(fills, 1);
}

TEST_F(ContextPrewarmer, IsNotTriedAgainWithADriverThatRefuses) {
  somebody_trains();
  driver::table().cuMemsetD32Async = +[](CUdeviceptr, unsigned, std::size_t, CUstream) {
    ++fills;
    return CUDA_ERROR_NOT_SUPPORTED;
  };
  for (int i = 0; i < 3; ++i) ASSERT_EQ(cudasched_expect(1), CUDASCHED_OK);
  EXPECT_EQ(fills, 1);
  // In the next context it is.
  Program::check(call<CUresult(CUdevice)>("cuDevicePrimaryCtxReset_v2")(0));
}

TEST_F(ContextPrewarmer, GoesWithItsContextHoweverThatEnds) {
  somebody_trains();
  int expected = 0;
  for (const char* const end : {"cuCtxDestroy_v2", "cuCtxDetach"}) {
    CUcontext other = nullptr;
    Program::check(call<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&other, 0, 0));
    ASSERT_EQ(cudasched_expect(1), CUDASCHED_OK);
    EXPECT_EQ(fills, ++expected) << end;
    Program::check(call<CUresult(CUcontext)>(end)(other));
    Program::check(call<CUresult(CUcontext)>("cuCtxSetCurrent")(program_.context()));
  }
  ASSERT_EQ(cudasched_expect(1), CUDASCHED_OK);
  EXPECT_EQ(fills, ++expected);
}

}  // namespace
}  // namespace cudasched::test
