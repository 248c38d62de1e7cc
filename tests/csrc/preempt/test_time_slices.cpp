// Time slices of the own contexts, over the simulated driver: its kernel module takes the calls, and like libcuda it
// sets a slice of its own 0.1 s after a context was made.
#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "preempt/time_slices.hpp"
#include "preempt/wire.hpp"
#include "private_directory.hpp"

namespace cudasched::preempt {
namespace {

using std::chrono::milliseconds;

class TimeSlicesTest : public ::testing::Test {
 protected:
  // `mode`: of CUDASCHED_SIM_TIME_SLICES.
  void begin(const char* mode = "on") {
    static const auto made = test::PrivateDirectory::in_memory();
    setenv("CUDASCHED_SIM_DIR", made.path().c_str(), 1);
    setenv("CUDASCHED_SIM_TIME_SLICES", mode, 1);
    driver_ = dlopen(CUDASCHED_SIMULATED_DRIVER, RTLD_NOW | RTLD_LOCAL);
    if (driver_ == nullptr) throw std::runtime_error(dlerror());
    ASSERT_TRUE(slices_.watch(driver_));
    ASSERT_EQ(call<decltype(cuInit)>("cuInit")(0), CUDA_SUCCESS);
  }
  template <typename Function>
  Function* call(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(driver_, name));
  }
  CUcontext new_context() {
    CUcontext context = nullptr;
    EXPECT_EQ((call<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&context, 0, 0)), CUDA_SUCCESS);
    return context;
  }
  void destroy(CUcontext context) { EXPECT_EQ((call<CUresult(CUcontext)>("cuCtxDestroy_v2")(context)), CUDA_SUCCESS); }
  // As the ticker does, for so long.
  void keep(std::uint32_t us, milliseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    do {
      slices_.keep(us, now_ns());
      std::this_thread::sleep_for(milliseconds(5));
    } while (std::chrono::steady_clock::now() < end);
  }

  // Of all groups, as the kernel module has them.
  using Lengths = std::vector<std::uint64_t>;
  Lengths lengths() {
    std::array<Group, Groups::kMost> groups;
    Lengths found;
    for (const Group& group : std::span(groups).first(slices_.groups().read(groups))) {
      wire::TimeSlice slice{0};
      wire::Control call{.client = group.client,
                         .object = group.handle,
                         .command = wire::kGetTimeSlice,
                         .flags = 0,
                         .parameters = reinterpret_cast<std::uintptr_t>(&slice),
                         .parameters_size = sizeof slice,
                         .status = wire::kNoStatus};
      EXPECT_EQ(kernel_module()(group.file.descriptor, wire::request(wire::kControl, sizeof call), &call), 0);
      found.push_back(slice.us);
    }
    return found;
  }
  auto kernel_module() -> int (*)(int, unsigned long, ...) {
    return reinterpret_cast<int (*)(int, unsigned long, ...)>(dlsym(driver_, "cudasched_simulated_ioctl"));
  }

  void* driver_ = nullptr;
  TimeSlices slices_;
};

TEST_F(TimeSlicesTest, AreSetAndSetAgainAfterLibcudasOwn) {
  begin();
  new_context();
  EXPECT_EQ(slices_.state(), State::kUnused);
  slices_.keep(1, now_ns());
  EXPECT_EQ(slices_.state(), State::kOn);
  EXPECT_EQ(slices_.us(), 1U);
  EXPECT_EQ(slices_.calls(), 2U);  // of kernels and of copies
  EXPECT_TRUE(slices_.interrupts_copies());
  keep(1, milliseconds(250));
  EXPECT_EQ(slices_.calls(), 3U);  // libcuda's own came between
  EXPECT_EQ(slices_.state(), State::kOn);
}

TEST_F(TimeSlicesTest, OfEachContextThatIsThereAndNoneThatIsGone) {
  begin();
  CUcontext const first = new_context();
  new_context();
  slices_.keep(1, now_ns());
  EXPECT_EQ(slices_.calls(), 4U);
  destroy(first);
  new_context();
  slices_.keep(1, now_ns());
  EXPECT_EQ(slices_.calls(), 6U);
  EXPECT_EQ(slices_.state(), State::kOn);
}

TEST_F(TimeSlicesTest, AnotherLengthIsSetAtOnceAndNoneGivesBackLibcudasOwn) {
  begin();
  new_context();
  std::this_thread::sleep_for(milliseconds(110));
  slices_.keep(1, now_ns());
  slices_.keep(500, now_ns());
  EXPECT_EQ(slices_.us(), 500U);
  EXPECT_EQ(slices_.calls(), 3U);  // that of copies is always the same
  EXPECT_EQ(lengths(), (Lengths{500, TimeSlices::kCopiesUs}));
  slices_.keep(0, now_ns());
  EXPECT_EQ(slices_.us(), 0U);
  EXPECT_EQ(slices_.state(), State::kUnused);
  EXPECT_EQ(slices_.calls(), 5U);
  EXPECT_EQ(lengths(), (Lengths{2'048, 1'024}));
  slices_.keep(0, now_ns());
  EXPECT_EQ(slices_.calls(), 5U);
}

TEST_F(TimeSlicesTest, OfKernelsAloneLeavesThoseOfCopiesAndGivesBackWhatWasSet) {
  begin();
  new_context();
  std::this_thread::sleep_for(milliseconds(110));
  slices_.keep(20'000, now_ns(), 0);
  EXPECT_EQ(lengths(), (Lengths{20'000, 1'024}));
  EXPECT_EQ(slices_.calls(), 1U);
  EXPECT_FALSE(slices_.interrupts_copies());
  slices_.keep(1, now_ns());
  EXPECT_EQ(lengths(), (Lengths{1, TimeSlices::kCopiesUs}));
  slices_.keep(1, now_ns(), 0);
  EXPECT_EQ(lengths(), (Lengths{1, 1'024}));
  slices_.keep(0, now_ns(), 0);
  EXPECT_EQ(lengths(), (Lengths{2'048, 1'024}));
  EXPECT_EQ(slices_.calls(), 5U);
}

TEST_F(TimeSlicesTest, ADriverThatRefusesThoseOfCopiesLeavesThoseOfKernels) {
  begin("copies refused");
  new_context();
  slices_.keep(1, now_ns());
  EXPECT_EQ(slices_.state(), State::kOn);
  EXPECT_EQ(slices_.why(), "");
  EXPECT_FALSE(slices_.interrupts_copies());
  EXPECT_EQ(slices_.calls(), 2U);
  keep(1, milliseconds(250));
  EXPECT_EQ(slices_.state(), State::kOn);
  EXPECT_EQ(slices_.calls(), 3U);  // of kernels, after libcuda's own
  EXPECT_EQ(lengths(), (Lengths{1, 1'024}));
}

TEST_F(TimeSlicesTest, WithoutAContextThatWasSeenNothingIsCalled) {
  begin("unknown");
  new_context();
  slices_.keep(1, now_ns());
  EXPECT_EQ(slices_.state(), State::kUnseen);
  EXPECT_EQ(slices_.us(), 0U);
  EXPECT_EQ(slices_.calls(), 0U);
}

// Each ends in no time slices, for good, and says why.
TEST_F(TimeSlicesTest, ADriverThatRefusesTurnsThemOff) {
  begin("refused");
  new_context();
  slices_.keep(1, now_ns());
  EXPECT_EQ(slices_.state(), State::kRefused);
  EXPECT_EQ(slices_.why(), "SET_TIMESLICE gave status 0x1b");
  slices_.keep(1, now_ns() + kNsPerSecond);
  EXPECT_EQ(slices_.calls(), 1U);
}

TEST_F(TimeSlicesTest, ADriverThatHasNoneTurnsThemOff) {
  begin("unsupported");
  new_context();
  slices_.keep(1, now_ns());
  EXPECT_EQ(slices_.state(), State::kRefused);
  EXPECT_EQ(slices_.why(), "GET_TIMESLICE gave status 0x56");
  EXPECT_EQ(slices_.calls(), 0U);
}

TEST_F(TimeSlicesTest, AKernelThatForbidsTheCallTurnsThemOff) {
  begin("forbidden");
  new_context();
  slices_.keep(1, now_ns());
  EXPECT_EQ(slices_.state(), State::kRefused);
  EXPECT_EQ(slices_.why(), "GET_TIMESLICE failed with errno 1");
}

TEST_F(TimeSlicesTest, AClosedFileTurnsThemOffAndIsNeverCalled) {
  begin("closed");
  new_context();
  slices_.keep(1, now_ns());
  EXPECT_EQ(slices_.state(), State::kLost);
  EXPECT_EQ(slices_.calls(), 0U);
}

TEST_F(TimeSlicesTest, AForkedChildKnowsNothingOfItsParentsContexts) {
  begin();
  new_context();
  slices_.keep(1, now_ns());
  slices_.reset_in_child();
  slices_.keep(1, now_ns() + 1);
  EXPECT_EQ(slices_.state(), State::kUnseen);
  EXPECT_EQ(slices_.calls(), 2U);
}

TEST_F(TimeSlicesTest, ADriverIsWatchedOnceAndALibraryWithoutIoctlNotAtAll) {
  begin();
  TimeSlices others;
  EXPECT_FALSE(others.watch(driver_));
  EXPECT_FALSE(others.watch(nullptr));
  EXPECT_FALSE(others.watch(dlopen("libm.so.6", RTLD_NOW)));
}

// The simulated GPU has fewer contexts than there is room for: these are told to what notes them.
TEST_F(TimeSlicesTest, MoreContextsThanThereIsRoomForTurnThemOff) {
  begin();
  new_context();
  slices_.keep(1, now_ns());
  EXPECT_EQ(slices_.state(), State::kOn);
  wire::GroupParameters parameters{0, 0, 0, wire::kFirstGraphics};
  for (std::uint32_t i = 0; i < Groups::kMost; ++i) {
    wire::Alloc call{.client = 1,
                     .parent = 2,
                     .object = 3 + i,
                     .object_class = wire::kChannelGroup,
                     .parameters = reinterpret_cast<std::uintptr_t>(&parameters),
                     .parameters_size = sizeof parameters,
                     .status = 0};
    slices_.groups().note(0, wire::request(wire::kAlloc, sizeof call), &call, 0);
  }
  slices_.keep(1, now_ns());
  EXPECT_EQ(slices_.state(), State::kRefused);
  EXPECT_EQ(slices_.why(), "it has more than 256 contexts");
}

// Contexts come and go on threads of their own while the lengths are kept: no call is made that the kernel module does
// not know, or they would be off.
TEST_F(TimeSlicesTest, ContextsComeAndGoMeanwhile) {
  begin();
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) destroy(new_context());
    });
  }
  std::thread keeper([&] {
    for (std::int64_t now = now_ns(); !done.load(); now += kNsPerSecond) {
      slices_.keep(1, now);
      EXPECT_NE(slices_.state(), State::kRefused) << slices_.why();
    }
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  keeper.join();
}

}  // namespace
}  // namespace cudasched::preempt
