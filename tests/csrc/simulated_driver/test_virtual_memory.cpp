// Reserved ranges: memory moves between addresses with its content, and nothing else is there.
#include "simulated_driver/fixture.hpp"

namespace cudasched::simulated_driver {
namespace {

constexpr std::size_t kPage = std::size_t{2} << 20;

class VirtualMemory : public DoubleTest {
 protected:
  void SetUp() override {
    DoubleTest::SetUp();
    ASSERT_EQ(cuMemAddressReserve(&range_, 8 * kPage, 0, 0, 0), CUDA_SUCCESS);
  }

  void TearDown() override {
    EXPECT_EQ(cuMemAddressFree(range_, 8 * kPage), CUDA_SUCCESS);
    DoubleTest::TearDown();
  }

  static CUmemGenericAllocationHandle create(std::size_t bytes) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(cuMemCreate(&handle, bytes, &properties, 0), CUDA_SUCCESS);
    return handle;
  }

  CUresult open(std::size_t page, std::size_t pages) const {
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return cuMemSetAccess(at(page), pages * kPage, &access, 1);
  }

  CUdeviceptr at(std::size_t page) const { return range_ + page * kPage; }

  CUdeviceptr range_ = 0;
};

TEST_F(VirtualMemory, ContentGoesWithTheHandle) {
  const auto first = create(kPage);
  const auto second = create(2 * kPage);
  ASSERT_EQ(cuMemMap(at(0), kPage, 0, first, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuMemsetD8(at(0), 1, kPage), CUDA_ERROR_INVALID_VALUE);  // without access
  EXPECT_EQ(cuMemMap(at(0), 2 * kPage, 0, second, 0), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuMemMap(at(1), 2 * kPage, 0, second, 0), CUDA_SUCCESS);
  EXPECT_EQ(open(0, 2), CUDA_ERROR_INVALID_VALUE);  // half a handle
  ASSERT_EQ(open(0, 3), CUDA_SUCCESS);
  ASSERT_EQ(cuMemsetD8(at(0), 7, 3 * kPage), CUDA_SUCCESS);
  EXPECT_EQ(cuMemsetD8(at(0), 7, 3 * kPage + 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemFree(at(0)), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(cuMemUnmap(at(1), kPage), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAddressFree(range_, 8 * kPage), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuMemUnmap(at(0), 3 * kPage), CUDA_SUCCESS);
  ASSERT_EQ(cuMemMap(at(5), 2 * kPage, 0, second, 0), CUDA_SUCCESS);
  ASSERT_EQ(open(5, 2), CUDA_SUCCESS);
  unsigned char last = 0;
  ASSERT_EQ(cuMemcpyDtoH(&last, at(7) - 1, 1), CUDA_SUCCESS);
  EXPECT_EQ(last, 7);
  ASSERT_EQ(cuMemUnmap(at(5), 2 * kPage), CUDA_SUCCESS);
  EXPECT_EQ(cuMemRelease(first), CUDA_SUCCESS);
  EXPECT_EQ(cuMemRelease(second), CUDA_SUCCESS);
}

TEST_F(VirtualMemory, HandlesOfAContextThatEndedHoldNothingOfTheNext) {
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  ASSERT_EQ(cuGraphCreate(&graph, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphInstantiate(&exec, graph, 0), CUDA_SUCCESS);
  const auto handle = create(kPage);
  ASSERT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&context_, 0), CUDA_SUCCESS);
  std::size_t free_bytes = 0;
  std::size_t left = 0;
  std::size_t total = 0;
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuMemGetInfo(&free_bytes, &total), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAlloc(&memory, 4 * kPage), CUDA_SUCCESS);
  EXPECT_EQ(cuGraphExecDestroy(exec), CUDA_SUCCESS);
  EXPECT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
  ASSERT_EQ(cuMemGetInfo(&left, &total), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes - left, 4 * kPage);
}

TEST_F(VirtualMemory, WorkOnMemoryThatIsUnmappedFails) {
  CUstream const busy = stream();
  const auto handle = create(kPage);
  ASSERT_EQ(cuMemMap(at(0), kPage, 0, handle, 0), CUDA_SUCCESS);
  ASSERT_EQ(open(0, 1), CUDA_SUCCESS);
  ASSERT_EQ(spin(busy, 5'000), CUDA_SUCCESS);
  ASSERT_EQ(cuMemcpyDtoDAsync(at(0), cursor_, 8, busy), CUDA_SUCCESS);
  ASSERT_EQ(cuMemUnmap(at(0), kPage), CUDA_SUCCESS);
  EXPECT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(busy), CUDA_ERROR_ILLEGAL_ADDRESS);
}

}  // namespace
}  // namespace cudasched::simulated_driver
