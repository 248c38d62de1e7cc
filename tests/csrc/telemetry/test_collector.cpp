// The collector over the simulated driver and a stand-in for CUPTI; launches are handed over as the engine does it.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "driver/driver.hpp"
#include "private_directory.hpp"
#include "telemetry/collector.hpp"
#include "telemetry/cupti.hpp"
#include "telemetry/journal.hpp"

namespace cudasched::telemetry {
namespace {

constexpr std::uint32_t kKernelUs = 50;

template <typename Function>
Function* driver_call(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

class CollectorTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    setenv("CUDASCHED_SIM_DIR", directory_.emplace().path().c_str(), 1);
    library_ = dlopen(CUDASCHED_SIMULATED_DRIVER, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
    driver::table().load(library_);
    ASSERT_EQ(driver::table().cuInit(0), CUDA_SUCCESS);
    driver_call<CUresult(CUcontext*, CUdevice)>(library_, "cuDevicePrimaryCtxRetain")(&context_, 0);
    use_context();
    CUmodule module = nullptr;
    driver_call<CUresult(CUmodule*, const void*)>(library_, "cuModuleLoadData")(
        &module, "cudasched-sim 1\nkernel work params=4 block_us=param:0 blocks_per_sm=4\n");
    driver_call<CUresult(CUfunction*, CUmodule, const char*)>(library_, "cuModuleGetFunction")(&kernel_, module,
                                                                                               "work");
    facts_.identity = 77;
    facts_.parameter_bytes = 16;
    facts_.registers = 32;
  }
  static void TearDownTestSuite() { directory_.reset(); }

  static void use_context() { driver_call<CUresult(CUcontext)>(library_, "cuCtxSetCurrent")(context_); }

  static CollectOptions options(Timing timing) {
    CollectOptions chosen;
    chosen.directory = directory_->path();
    chosen.timing = timing;
    chosen.cupti_path = CUDASCHED_FAKE_CUPTI;
    return chosen;
  }

  // As the hook does it.
  static void launch(std::span<const std::uint32_t> words = {}, bool fails = false) {
    predict::Launch what;
    what.function = kernel_;
    what.block[0] = 32;
    std::uint32_t us = kKernelUs;
    void* parameters[] = {&us};
    const Record record = begin_record(CU_STREAM_LEGACY, /*may_time=*/true);
    const CUresult status =
        driver::table().cuLaunchKernel.legacy(kernel_, 1, 1, 1, fails ? 0 : 32, 1, 1, 0, nullptr, parameters, nullptr);
    EXPECT_EQ(status == CUDA_SUCCESS, !fails);
    const Launched launched{.launch = what,
                            .stream = CU_STREAM_LEGACY,
                            .device = 0,
                            .function = &facts_,
                            .name = "work",
                            .words = words,
                            .blocks_per_sm = 4};
    end_record(record, status == CUDA_SUCCESS ? &launched : nullptr);
  }

  struct Read {
    std::vector<Row> rows;
    std::vector<std::uint32_t> words;
    std::vector<std::uint16_t> pointers;
    std::vector<std::int64_t> elapsed;
    std::string texts;
    bool ended = false;
  };

  static Read read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string data{std::istreambuf_iterator<char>(file), {}};
    Read result;
    std::size_t at = 16;
    while (at < data.size()) {
      std::uint32_t type = 0;
      std::uint64_t bytes = 0;
      std::uint32_t count = 0;
      std::memcpy(&type, &data[at + 4], 4);
      std::memcpy(&bytes, &data[at + 8], 8);
      std::memcpy(&count, &data[at + 16], 4);
      at += 24;
      const char* next = &data[at];
      at += bytes;
      if (type == static_cast<std::uint32_t>(Journal::Block::kEnd)) result.ended = true;
      if (type == static_cast<std::uint32_t>(Journal::Block::kTexts)) result.texts += std::string(next, bytes);
      if (type == static_cast<std::uint32_t>(Journal::Block::kElapsed)) {
        EXPECT_EQ(bytes, count * sizeof(std::int64_t));
        const std::size_t before = result.elapsed.size();
        result.elapsed.resize(before + count);
        std::memcpy(&result.elapsed[before], next, bytes);
      }
      if (type != static_cast<std::uint32_t>(Journal::Block::kRows)) continue;
      std::vector<Row> rows(count);
      std::memcpy(rows.data(), next, count * sizeof(Row));
      next += count * sizeof(Row);
      std::size_t words = 0;
      std::size_t pointers = 0;
      for (const Row& row : rows) {
        words += row.word_count;
        pointers += row.pointer_count;
      }
      EXPECT_EQ(bytes, count * sizeof(Row) + 4 * words + 2 * pointers);
      result.words.insert(result.words.end(), reinterpret_cast<const std::uint32_t*>(next),
                          reinterpret_cast<const std::uint32_t*>(next) + words);
      next += 4 * words;
      result.pointers.insert(result.pointers.end(), reinterpret_cast<const std::uint16_t*>(next),
                             reinterpret_cast<const std::uint16_t*>(next) + pointers);
      result.rows.insert(result.rows.end(), rows.begin(), rows.end());
    }
    return result;
  }

  static inline std::optional<test::PrivateDirectory> directory_;
  static inline void* library_ = nullptr;
  static inline CUcontext context_ = nullptr;
  static inline CUfunction kernel_ = nullptr;
  static inline predict::Function facts_;
};

class EachTiming : public CollectorTest, public ::testing::WithParamInterface<Timing> {};

TEST_P(EachTiming, EveryLaunchThatTheDriverTookHasARowInOrder) {
  start_collecting(options(GetParam()));
  EXPECT_TRUE(collecting());
  for (int i = 0; i < 20; ++i) launch({}, /*fails=*/i % 5 == 1);
  const Collected collected = stop_collecting(/*synchronize=*/true);
  EXPECT_FALSE(collecting());
  EXPECT_EQ(collected.lost, 0U);
  const Read found = read(collected.journal);
  ASSERT_EQ(found.rows.size(), 16U);
  EXPECT_EQ(collected.rows, 16U);
  EXPECT_TRUE(found.ended);
  for (std::size_t i = 0; i < found.rows.size(); ++i) {
    const Row& row = found.rows[i];
    EXPECT_TRUE(i == 0 || row.launch > found.rows[i - 1].launch);
    EXPECT_EQ(row.identity, 77U);
    EXPECT_EQ(row.registers, 32U);
    EXPECT_EQ(row.blocks_per_sm, 4U);
    EXPECT_GT(row.waves, 0);
    // The stand-in says of a launch that was refused that it ran; its row is not there.
    EXPECT_GT(row.duration_ns, 0);
    EXPECT_GE(row.start_ns + kKernelUs * 1000, row.submitted_ns);
    EXPECT_LT(row.start_ns - row.submitted_ns, 10'000'000'000) << "on another clock";
  }
  EXPECT_NE(found.texts.find("work"), std::string::npos);
}

TEST_P(EachTiming, ASecondCollectionBeginsAnew) {
  for (int turn = 0; turn < 2; ++turn) {
    start_collecting(options(GetParam()));
    EXPECT_THROW(start_collecting(options(GetParam())), Error);
    launch();
    const Read found = read(stop_collecting(true).journal);
    ASSERT_EQ(found.rows.size(), 1U);
    EXPECT_EQ(found.rows[0].launch, 0U);
    EXPECT_NE(found.texts.find("work"), std::string::npos) << "each journal names its kernels";
  }
}

TEST_P(EachTiming, ThreadsAreToldApart) {
  start_collecting(options(GetParam()));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      use_context();
      for (int j = 0; j < 50; ++j) launch();
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Read found = read(stop_collecting(true).journal);
  ASSERT_EQ(found.rows.size(), 200U);
  std::array<int, 4> launches{};
  for (const Row& row : found.rows) {
    ASSERT_LT(row.thread, 4U);
    ++launches[row.thread];
  }
  EXPECT_EQ(launches, (std::array{50, 50, 50, 50}));
}

INSTANTIATE_TEST_SUITE_P(Timings, EachTiming, ::testing::Values(Timing::kCupti, Timing::kEvents, Timing::kBoth),
                         [](const auto& timing) {
                           return timing.param == Timing::kCupti    ? "Cupti"
                                  : timing.param == Timing::kEvents ? "Events"
                                                                    : "Both";
                         });

TEST_F(CollectorTest, BothTimesOfOneLaunchAreKeptApart) {
  start_collecting(options(Timing::kBoth));
  for (int i = 0; i < 20; ++i) launch({}, /*fails=*/i % 5 == 1);
  const Read found = read(stop_collecting(/*synchronize=*/true).journal);
  ASSERT_EQ(found.rows.size(), 16U);
  ASSERT_EQ(found.elapsed.size(), found.rows.size());
  for (std::size_t i = 0; i < found.rows.size(); ++i) {
    EXPECT_GE(found.elapsed[i], kKernelUs * 1000)
        << "events stand before and behind the kernel, and nothing is taken off";
  }
}

TEST_F(CollectorTest, OneTimingAloneLeavesNoTimesBesideTheRows) {
  start_collecting(options(Timing::kCupti));
  launch();
  EXPECT_TRUE(read(stop_collecting(true).journal).elapsed.empty());
}

TEST_F(CollectorTest, PointersAreZeroedAndNamed) {
  predict::Allocations allocations;
  allocations.add(0x7F00'1234'0000, 4096);
  CollectOptions chosen = options(Timing::kCupti);
  chosen.allocations = &allocations;
  start_collecting(chosen);
  const std::array<std::uint32_t, 4> words{11, 12, 0x1234'0010, 0x7F00};
  launch(words);
  const Read found = read(stop_collecting(true).journal);
  EXPECT_EQ(found.words, (std::vector<std::uint32_t>{11, 12, 0, 0}));
  EXPECT_EQ(found.pointers, (std::vector<std::uint16_t>{2, 3}));
}

int events_made = 0;
decltype(driver::table().cuEventCreate) make_event = nullptr;

TEST_F(CollectorTest, LaunchesWithoutRoomAreCountedAndLeaveTheirEventsToOthers) {
  make_event = driver::table().cuEventCreate;
  driver::table().cuEventCreate = [](CUevent* event, unsigned flags) {
    ++events_made;
    return make_event(event, flags);
  };
  for (const Timing timing : {Timing::kCupti, Timing::kEvents}) {
    CollectOptions chosen = options(timing);
    chosen.capacity_bytes = 4096;
    start_collecting(chosen);
    constexpr std::uint64_t kLaunches = 500;
    for (std::uint64_t i = 0; i < kLaunches; ++i) launch();
    const Collected collected = stop_collecting(true);
    EXPECT_EQ(collected.rows + collected.lost, kLaunches);
    EXPECT_GT(collected.rows, 0U);
    EXPECT_EQ(read(collected.journal).rows.size(), collected.rows);
    EXPECT_LT(events_made, static_cast<int>(kLaunches));
  }
  driver::table().cuEventCreate = make_event;
}

TEST_F(CollectorTest, ARefusedLaunchLeavesTheDefaultStreamAlone) {
  CUstream capturing = nullptr;
  CUstream launching = nullptr;
  auto* const make = driver_call<CUresult(CUstream*, unsigned)>(library_, "cuStreamCreate");
  make(&capturing, CU_STREAM_DEFAULT);
  make(&launching, CU_STREAM_NON_BLOCKING);
  start_collecting(options(Timing::kEvents));
  driver_call<CUresult(CUstream, CUstreamCaptureMode)>(library_, "cuStreamBeginCapture_v2")(
      capturing, CU_STREAM_CAPTURE_MODE_RELAXED);
  end_record(begin_record(launching, /*may_time=*/true), nullptr);
  CUgraph graph = nullptr;
  EXPECT_EQ(driver_call<CUresult(CUstream, CUgraph*)>(library_, "cuStreamEndCapture")(capturing, &graph), CUDA_SUCCESS)
      << "work in the default stream ends the captures of streams that wait for it";
  EXPECT_EQ(stop_collecting(true).rows, 0U);
}

TEST_F(CollectorTest, ALabelHoldsFromWhenItIsSaid) {
  start_collecting(options(Timing::kCupti));
  launch();
  set_label("gemm|4096|bf16");
  launch();
  set_label("");
  launch();
  const Read found = read(stop_collecting(true).journal);
  ASSERT_EQ(found.rows.size(), 3U);
  EXPECT_EQ(found.rows[0].label, 0U);
  EXPECT_NE(found.rows[1].label, 0U);
  EXPECT_EQ(found.rows[2].label, 0U);
  EXPECT_NE(found.texts.find("gemm|4096|bf16"), std::string::npos);
}

TEST_F(CollectorTest, ALaunchThatEndsAfterTheCollectionIsLeftOut) {
  start_collecting(options(Timing::kCupti));
  const Record record = begin_record(CU_STREAM_LEGACY, true);
  const Collected first = stop_collecting(true);
  start_collecting(options(Timing::kCupti));
  const predict::Launch what;
  const Launched launched{.launch = what, .function = &facts_};
  end_record(record, &launched);
  launch();
  const Collected second = stop_collecting(true);
  EXPECT_EQ(first.rows, 0U);
  EXPECT_EQ(second.rows, 1U);
}

// As where the disk fills up: the collection has ended, and its thread has not.
TEST_F(CollectorTest, ACollectionMayBeginAfterOneThatCouldNotBeWritten) {
  for (const Timing timing : {Timing::kCupti, Timing::kEvents, Timing::kBoth}) {
    start_collecting(options(timing));
    launch();
    for (const auto& open : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const std::string path = std::filesystem::read_symlink(open.path(), gone);
      if (path.ends_with(".journal")) close(std::stoi(open.path().filename()));
    }
    while (collecting()) usleep(1000);
    start_collecting(options(timing));
    for (int i = 0; i < 100; ++i) launch();
    const Collected collected = stop_collecting(true);
    EXPECT_EQ(collected.rows, 100U);
    EXPECT_EQ(read(collected.journal).rows.size(), 100U);
  }
}

TEST_F(CollectorTest, StartsThatFailLeaveNothingBehind) {
  CollectOptions chosen = options(Timing::kCupti);
  chosen.directory = directory_->path() + "/fresh";
  EXPECT_THROW(start_collecting(chosen), Error) << "no such directory";
  std::filesystem::create_directory(chosen.directory);
  setenv("FAKE_CUPTI_HELD", "1", 1);
  try {
    start_collecting(chosen);
    ADD_FAILURE() << "another profiler holds CUPTI";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("another profiler"), std::string::npos) << error.what();
  }
  unsetenv("FAKE_CUPTI_HELD");
  EXPECT_FALSE(collecting());
  EXPECT_TRUE(std::filesystem::is_empty(chosen.directory));
  EXPECT_EQ(stop_collecting(true).rows, 0U) << "nothing to stop";
}

TEST_F(CollectorTest, CoverageAndCollectionShareTheSession) {
  cupti::start(cupti::Use::kCount, CUDASCHED_FAKE_CUPTI);
  const std::uint64_t before = cupti::device_launches();
  start_collecting(options(Timing::kCupti));
  for (int i = 0; i < 10; ++i) launch();
  EXPECT_EQ(stop_collecting(true).rows, 10U);
  EXPECT_EQ(cupti::device_launches() - before, 10U);
  EXPECT_TRUE(cupti::started(cupti::Use::kCount));
  cupti::stop(cupti::Use::kCount);
}

TEST_F(CollectorTest, AForkedChildCollectsNothingAndLeavesTheParentsJournalAlone) {
  start_collecting(options(Timing::kCupti));
  launch();
  const pid_t child = fork();
  if (child == 0) {
    reset_collecting_in_child();
    const bool off = !collecting() && stop_collecting(true).journal.empty();
    _exit(off ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  launch();
  EXPECT_EQ(stop_collecting(true).rows, 2U);
}

}  // namespace
}  // namespace cudasched::telemetry
