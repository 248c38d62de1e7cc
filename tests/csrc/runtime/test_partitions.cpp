// Parts of the SMs, and launches on streams of green contexts; over the simulated driver.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "hooked_driver.hpp"
#include "runtime/partitions.hpp"

namespace cudasched::test {
namespace {

using ::testing::Test;

TEST(PartitionSms, AreAMultipleOfTheStepNotAboveTheFractionAndAtLeastTheLeast) {
  using runtime::partition_sms;
  EXPECT_EQ(partition_sms(0.5, 132, 8, 8), 64U);
  EXPECT_EQ(partition_sms(0.97, 132, 8, 8), 128U);
  EXPECT_EQ(partition_sms(64.0 / 132, 132, 8, 8), 64U);
  EXPECT_EQ(partition_sms(0.001, 132, 8, 8), 8U);
  EXPECT_EQ(partition_sms(0.5, 108, 4, 2), 54U);
  EXPECT_EQ(partition_sms(0.5, 8, 8, 8), 0U);
  EXPECT_EQ(partition_sms(0.99, 16, 8, 8), 8U);
}

class Partitions : public Test {
 protected:
  static CUstream partition(double fraction) {
    std::uint64_t stream = 0;
    if (cudasched_partition_stream(fraction, &stream) != CUDASCHED_OK) throw std::runtime_error(cudasched_last_error());
    return reinterpret_cast<CUstream>(stream);
  }

  static unsigned sms_of(CUstream stream) {
    CUgreenCtx green = nullptr;
    Program::check(call<decltype(cuStreamGetGreenCtx)>("cuStreamGetGreenCtx")(stream, &green));
    CUdevResource resource{};
    Program::check(call<decltype(cuGreenCtxGetDevResource)>("cuGreenCtxGetDevResource")(green, &resource,
                                                                                        CU_DEV_RESOURCE_TYPE_SM));
    return resource.sm.smCount;
  }

  // A green context as a program makes one.
  static CUgreenCtx new_green() {
    CUdevResource all{};
    Program::check(call<decltype(cuDeviceGetDevResource)>("cuDeviceGetDevResource")(0, &all, CU_DEV_RESOURCE_TYPE_SM));
    CUdevResourceDesc description = nullptr;
    Program::check(call<decltype(cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc")(&description, &all, 1));
    CUgreenCtx green = nullptr;
    Program::check(
        call<decltype(cuGreenCtxCreate)>("cuGreenCtxCreate")(&green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    return green;
  }

  // How many of four launches the launcher thread made.
  std::uint64_t offloaded(CUstream stream) {
    Program::check(program_.launch(1, stream));  // the first of its kind is never deferred
    Program::check(program_.synchronize(stream));
    const std::uint64_t before = state().offloaded_launches;
    for (int i = 0; i < 4; ++i) Program::check(program_.launch(1, stream));
    Program::check(program_.synchronize(stream));
    return state().offloaded_launches - before;
  }

  Program program_;
};

TEST_F(Partitions, AreMadeOnceForADeviceAndACount) {
  const CUstream half = partition(0.5);
  EXPECT_EQ(sms_of(half), 64U);
  EXPECT_EQ(partition(0.52), half);
  const CUstream quarter = partition(0.25);
  EXPECT_NE(quarter, half);
  EXPECT_EQ(sms_of(quarter), 32U);
  EXPECT_EQ(partition(0.5), half);
}

TEST_F(Partitions, AreOfClassBestEffortOnWhicheverThreadAndDeferredFromThePrimaryContext) {
  const std::uint64_t before = state().best_effort_launches;
  EXPECT_EQ(offloaded(partition(0.5)), 4U);
  EXPECT_EQ(state().best_effort_launches, before + 5);
  EXPECT_EQ(program_.ran(), 5U);
}

TEST_F(Partitions, RefuseWhatHasNoMeaning) {
  std::uint64_t stream = 0;
  for (const double fraction : {0.0, 1.0, -0.5, 2.0, std::nan("")}) {
    EXPECT_EQ(cudasched_partition_stream(fraction, &stream), CUDASCHED_CONFIG_ERROR) << fraction;
  }
}

TEST_F(Partitions, NeedGreenContexts) {
  auto& entry = driver::table().cuGreenCtxStreamCreate;
  auto* const before = entry;
  entry = nullptr;
  std::uint64_t stream = 0;
  EXPECT_EQ(cudasched_partition_stream(0.5, &stream), CUDASCHED_HOOK_ERROR);
  EXPECT_NE(std::string(cudasched_last_error()).find("12.5"), std::string::npos) << cudasched_last_error();
  entry = before;
}

TEST_F(Partitions, NeedAPrimaryContext) {
  std::uint64_t stream = 0;
  const auto set_current = call<CUresult(CUcontext)>("cuCtxSetCurrent");
  CUcontext other = nullptr;
  Program::check(call<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&other, 0, 0));
  EXPECT_EQ(cudasched_partition_stream(0.5, &stream), CUDASCHED_INTERNAL_ERROR);
  EXPECT_NE(std::string(cudasched_last_error()).find("cudaSetDevice"), std::string::npos) << cudasched_last_error();
  Program::check(call<CUresult(CUcontext)>("cuCtxDestroy_v2")(other));
  Program::check(set_current(nullptr));
  EXPECT_EQ(cudasched_partition_stream(0.5, &stream), CUDASCHED_INTERNAL_ERROR);
  Program::check(set_current(program_.context()));
}

TEST_F(Partitions, ThatTheDriverDoesNotFinishLeaveNothingBehind) {
  auto& entry = driver::table().cuGreenCtxStreamCreate;
  auto* const before = entry;
  entry = [](CUstream*, CUgreenCtx, unsigned, int) { return CUDA_ERROR_OUT_OF_MEMORY; };
  std::uint64_t stream = 0;
  EXPECT_EQ(cudasched_partition_stream(0.75, &stream), CUDASCHED_DRIVER_ERROR);
  EXPECT_NE(std::string(cudasched_last_error()).find("cuGreenCtxStreamCreate"), std::string::npos);
  entry = before;
  EXPECT_EQ(sms_of(partition(0.75)), 96U);
}

// The launcher would have to make it current beside the program's own thread, which the driver does not allow.
TEST_F(Partitions, LaunchesInAGreenContextOfTheProgramsOwnAreNotDeferred) {
  const CUgreenCtx green = new_green();
  CUcontext context = nullptr;
  Program::check(call<decltype(cuCtxFromGreenCtx)>("cuCtxFromGreenCtx")(&context, green));
  CUstream stream = nullptr;
  Program::check(
      call<decltype(cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate")(&stream, green, CU_STREAM_NON_BLOCKING, 0));
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const auto set_current = call<CUresult(CUcontext)>("cuCtxSetCurrent");
  Program::check(set_current(context));
  EXPECT_EQ(offloaded(stream), 0U);
  EXPECT_EQ(offloaded(program_.stream()), 0U);
  Program::check(set_current(program_.context()));
  EXPECT_EQ(offloaded(stream), 4U);
  EXPECT_EQ(program_.ran(), 15U);
  Program::check(call<CUresult(CUstream)>("cuStreamDestroy_v2")(stream));
  Program::check(call<CUresult(CUgreenCtx)>("cuGreenCtxDestroy")(green));
  EXPECT_EQ(offloaded(program_.stream()), 4U);
}

}  // namespace
}  // namespace cudasched::test
