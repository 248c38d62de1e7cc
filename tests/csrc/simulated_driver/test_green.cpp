// Green contexts: counted, named and refused as the driver does it.
#include "simulated_driver/fixture.hpp"

namespace cudasched::simulated_driver {
namespace {

class GreenTest : public DoubleTest {
 protected:
  static CUdevResource all() {
    CUdevResource found{};
    EXPECT_EQ(cuDeviceGetDevResource(0, &found, CU_DEV_RESOURCE_TYPE_SM), CUDA_SUCCESS);
    return found;
  }

  static CUgreenCtx green(CUdevResource from) {
    CUdevResourceDesc description = nullptr;
    EXPECT_EQ(cuDevResourceGenerateDesc(&description, &from, 1), CUDA_SUCCESS);
    CUgreenCtx made = nullptr;
    EXPECT_EQ(cuGreenCtxCreate(&made, description, 0, CU_GREEN_CTX_DEFAULT_STREAM), CUDA_SUCCESS);
    return made;
  }

  static CUgreenCtx green_of(CUstream of) {
    CUgreenCtx found = nullptr;
    EXPECT_EQ(cuStreamGetGreenCtx(of, &found), CUDA_SUCCESS);
    return found;
  }
};

TEST_F(GreenTest, SmsAreSplitInMultiplesOfEight) {
  const CUdevResource whole = all();
  EXPECT_EQ(whole.sm.smCount, 132U);
  CUdevResource parts[20];
  CUdevResource rest{};
  unsigned groups = 20;
  ASSERT_EQ(cuDevSmResourceSplitByCount(parts, &groups, &whole, &rest, 0, 33), CUDA_SUCCESS);
  EXPECT_EQ(groups, 3U);
  EXPECT_EQ(parts[0].sm.smCount, 40U);
  EXPECT_EQ(rest.sm.smCount, 12U);
  ASSERT_EQ(cuDevSmResourceSplitByCount(nullptr, &groups, &whole, nullptr, 0, 1), CUDA_SUCCESS);
  EXPECT_EQ(groups, 16U);
  for (const unsigned too_many : {133U, ~0U}) {
    EXPECT_EQ(cuDevSmResourceSplitByCount(parts, &groups, &whole, nullptr, 0, too_many),
              CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
  }
}

TEST_F(GreenTest, StreamsRunFromThePrimaryContextAndKnowTheirs) {
  const CUgreenCtx made = green(all());
  CUstream own = nullptr;
  EXPECT_EQ(cuGreenCtxStreamCreate(&own, made, CU_STREAM_DEFAULT, 0), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuGreenCtxStreamCreate(&own, made, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
  EXPECT_EQ(green_of(own), made);
  EXPECT_EQ(green_of(stream()), nullptr);
  EXPECT_EQ(green_of(CU_STREAM_LEGACY), nullptr);
  ASSERT_EQ(append(own, 7), CUDA_SUCCESS);
  EXPECT_EQ(log(), (std::vector<std::uint64_t>{7}));
  ASSERT_EQ(cuGreenCtxDestroy(made), CUDA_SUCCESS);
}

TEST_F(GreenTest, OneThatIsCurrentIsSeenAndGoesWithItsHandle) {
  const CUgreenCtx made = green(all());
  CUcontext context = nullptr;
  ASSERT_EQ(cuCtxFromGreenCtx(&context, made), CUDA_SUCCESS);
  EXPECT_NE(context, context_);
  ASSERT_EQ(cuCtxSetCurrent(context), CUDA_SUCCESS);
  CUcontext current = nullptr;
  ASSERT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, context);
  EXPECT_EQ(green_of(nullptr), made);
  EXPECT_EQ(green_of(stream()), made);
  ASSERT_EQ(append(nullptr, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  ASSERT_EQ(cuGreenCtxDestroy(made), CUDA_SUCCESS);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(green_of(nullptr), nullptr);
  EXPECT_EQ(cuGreenCtxDestroy(made), CUDA_ERROR_INVALID_CONTEXT);
}

}  // namespace
}  // namespace cudasched::simulated_driver
