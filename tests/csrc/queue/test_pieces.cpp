// Copies in pieces: which calls the driver sees, in which order, and what the memory holds afterwards.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "fake_driver.hpp"

namespace cudasched::queue {
namespace {

using testing::ElementsAre;
using testing::UnorderedElementsAre;
using Direction = Operation::Direction;
using For = Waiter::For;

class PiecesTest : public QueueTest {
 protected:
  bool copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, Direction direction, CUstream stream = kStream,
            unsigned thread = 1) {
    return queue().push_call({thread, kContext, false}, copy_of({to, from, bytes, direction}, stream));
  }
  bool in(std::size_t bytes, CUstream stream = kStream, unsigned thread = 1) {
    return copy(0x1000, 0x2000, bytes, Direction::kToDevice, stream, thread);
  }
  static CUdeviceptr address(const void* at) { return reinterpret_cast<CUdeviceptr>(at); }
  // Name, destination, source and length of each call.
  std::vector<std::string> copies() {
    std::vector<std::string> lines;
    for (const DriverCall& call : driver_.made()) {
      std::array<char, 96> line{};
      if (call.values.size() < 2) {
        std::snprintf(line.data(), line.size(), "%s", call.name.c_str());
      } else {
        std::snprintf(line.data(), line.size(), "%s %llx %llx %llu", call.name.c_str(),
                      static_cast<unsigned long long>(call.what), static_cast<unsigned long long>(call.values[0]),
                      static_cast<unsigned long long>(call.values[1]));
      }
      lines.emplace_back(line.data());
    }
    return lines;
  }
  // No piece but the first `count` goes, until let_all().
  void let(int count) {
    left_ = count;
    gate_.cut_copies(100, [this] { return left_.fetch_sub(1) > 0; });
  }
  void let_all() { left_ = 1 << 30; }
  // The launcher has looked at the copies that the gate holds back, and at all that is queued behind them.
  void let_it_look() {
    const int before = gate_.pieces_asked();
    ASSERT_TRUE(eventually([&] { return gate_.pieces_asked() > before + 20; }));
  }

  std::atomic<int> left_{0};
};

TEST_F(PiecesTest, ALongCopyIsTheSameBytesInOrderAndOneOperation) {
  gate_.cut_copies(100);
  ASSERT_TRUE(in(250));
  ASSERT_TRUE(copy(0x2000, 0x1000, 200, Direction::kToHost));
  finish();
  EXPECT_THAT(copies(),
              ElementsAre("copy_to_device 1000 2000 100", "copy_to_device 1064 2064 100", "copy_to_device 10c8 20c8 50",
                          "copy_to_host 2000 1000 100", "copy_to_host 2064 1064 100"));
  EXPECT_THAT(gate_.pieces(), ElementsAre(Direction::kToDevice, Direction::kToDevice, Direction::kToDevice,
                                          Direction::kToHost, Direction::kToHost));
  EXPECT_EQ(queue().passed(), 2U);
}

TEST_F(PiecesTest, ACopyOfAPieceGoesWhole) {
  gate_.cut_copies(100);
  ASSERT_TRUE(in(100));
  ASSERT_TRUE(copy(0x1000, 0x2000, 500, Direction::kAny));
  finish();
  EXPECT_THAT(copies(), ElementsAre("copy_to_device 1000 2000 100", "copy 1000 2000 500"));
  EXPECT_TRUE(gate_.pieces().empty());
}

TEST_F(PiecesTest, WhatIsOrderedBehindACopyWaitsForItsLastPieceAndTheRestDoesNot) {
  let(1);
  ASSERT_TRUE(in(300));
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));          // stays
  ASSERT_TRUE(queue().push_call(caller_, wait_of(kNonBlocking, kEvent, 0)));       // stays, and keeps its stream
  ASSERT_TRUE(launch(kNonBlocking));                                               // stays
  ASSERT_TRUE(launch(kOtherStream));                                               // goes
  ASSERT_TRUE(copy(0x7, 0x8, 150, Direction::kToHost, kOtherStream));              // the other direction: begins
  ASSERT_TRUE(launch(kOtherStream));                                               // stays behind that
  ASSERT_TRUE(copy(0x3, 0x4, 150, Direction::kToDevice, handle<CUstream>(0x55)));  // stays: the same direction
  ASSERT_TRUE(eventually([&] { return driver_.count() == 2; }));
  let_it_look();
  EXPECT_THAT(driver_.story(), ElementsAre("copy_to_device 1000", "kernel f2"));
  EXPECT_EQ(queue().passed(), 0U);
  let_all();
  finish();
  // The launcher looks at one direction after the other, and let_all() may come in between.
  std::vector<std::string> story = driver_.story();
  ASSERT_EQ(story.size(), 12U);
  if (story[2] == "copy_to_host 7") std::rotate(story.begin() + 2, story.begin() + 4, story.begin() + 6);
  EXPECT_THAT(story, ElementsAre("copy_to_device 1000", "kernel f2", "copy_to_device 1064", "copy_to_device 10c8",
                                 "copy_to_host 7", "copy_to_host 6b", "record e1", "wait e1", "kernel f2", "kernel f2",
                                 "copy_to_device 3", "copy_to_device 67"));
  EXPECT_EQ(queue().passed(), queue().pushed());
}

TEST_F(PiecesTest, TheNextCopyOfADirectionBeginsWhenTheLastEndsWhicheverIsTheHead) {
  gate_.cut_copies(100);
  gate_.only(Direction::kToHost);
  ASSERT_TRUE(in(200));  // the head
  ASSERT_TRUE(copy(0x7, 0x8, 200, Direction::kToHost, kOtherStream));
  ASSERT_TRUE(copy(0x9, 0x8, 200, Direction::kToHost, kOtherStream));
  EXPECT_TRUE(eventually([&] { return gate_.pieces().size() == 4; }));
  EXPECT_THAT(driver_.story(), ElementsAre("copy_to_host 7", "copy_to_host 6b", "copy_to_host 9", "copy_to_host 6d"));
  gate_.only(Direction::kAny);
  finish();
}

TEST_F(PiecesTest, NothingOvertakesACopyOnTheLegacyStream) {
  let(1);
  ASSERT_TRUE(in(200, CU_STREAM_LEGACY));
  ASSERT_TRUE(launch(kOtherStream));
  let_it_look();
  EXPECT_THAT(driver_.story(), ElementsAre("copy_to_device 1000"));
  let_all();
  finish();
  EXPECT_THAT(driver_.story(), ElementsAre("copy_to_device 1000", "copy_to_device 1064", "kernel f2"));
}

TEST_F(PiecesTest, PiecesGoWhileALaunchWaitsAtTheGate) {
  let(1);
  ASSERT_TRUE(in(300));
  block(kOtherStream);
  let_all();
  EXPECT_TRUE(eventually([&] { return gate_.pieces().size() == 3; }));
  EXPECT_THAT(driver_.story(), ElementsAre("copy_to_device 1000", "copy_to_device 1064", "copy_to_device 10c8"));
  finish();
}

TEST_F(PiecesTest, WhoMayNotWaitGetsTheRestAtOnceAndNoLaunchHoldsItUp) {
  let(1);
  ASSERT_TRUE(in(300));
  block(kOtherStream);  // it overtakes, and stands at a closed gate
  EXPECT_TRUE(opens(latency_, 1, For::kSynchronise));
  EXPECT_THAT(copies(),
              UnorderedElementsAre("copy_to_device 1000 2000 100", "kernel f2 1 1", "copy_to_device 1064 2064 200"));
}

TEST_F(PiecesTest, TheFirstErrorIsTheCopysAndNoFurtherPieceGoes) {
  gate_.cut_copies(100);
  driver_.on_call = [](const DriverCall& call) {
    return call.what == 0x1064 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  };
  ASSERT_TRUE(in(500, kStream, 7));
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  finish();
  EXPECT_THAT(driver_.story(), ElementsAre("copy_to_device 1000", "copy_to_device 1064", "record e1"));
  EXPECT_EQ(queue().take_error(8), CUDA_SUCCESS);
  EXPECT_EQ(queue().take_error(7), CUDA_ERROR_INVALID_VALUE);
  // One that overtakes.
  let(0);
  ASSERT_TRUE(copy(0x7, 0x8, 150, Direction::kToHost, kOtherStream));
  ASSERT_TRUE(in(500, kStream, 9));
  let_all();
  finish();
  EXPECT_EQ(queue().take_error(9), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(queue().take_error(1), CUDA_SUCCESS);
}

TEST_F(PiecesTest, ACopyWhoseContextGoesMidwayIsAnErrorAndMakesRoomForTheNext) {
  let(1);
  ASSERT_TRUE(in(300));
  let_it_look();
  driver::table().cuCtxSetCurrent = [](CUcontext) { return CUDA_ERROR_INVALID_CONTEXT; };
  queue().context_gone();
  ASSERT_TRUE(eventually([&] { return queue().passed() == 1; }));
  EXPECT_EQ(queue().take_error(1), CUDA_ERROR_INVALID_CONTEXT);
  FakeDriver::fill_table();
  let_all();
  ASSERT_TRUE(in(200));
  finish();
  EXPECT_THAT(driver_.story(), ElementsAre("copy_to_device 1000", "copy_to_device 1000", "copy_to_device 1064"));
}

TEST_F(PiecesTest, ACopyBetweenTheSlicesOfAGraphGoesInPiecesToo) {
  make_graph(kGraph);
  gate_.cut({handle<CUgraphExec>(0xa1), handle<CUgraphExec>(0xa2)});
  gate_.cut_copies(100);
  gate_.close();
  driver_.on_call = [&](const DriverCall& call) {
    if (call.what == 0xa1) gate_.close();
    return CUDA_SUCCESS;
  };
  ASSERT_TRUE(push_graph(kGraph));
  ASSERT_TRUE(in(300, kOtherStream));
  gate_.open();
  ASSERT_TRUE(eventually([&] { return gate_.pieces().size() == 3; }));
  finish();
  EXPECT_THAT(driver_.story(),
              ElementsAre("graph a1", "copy_to_device 1000", "copy_to_device 1064", "copy_to_device 10c8", "graph a2"));
}

TEST_F(PiecesTest, ALauncherThatEndsMidwayCopiesNoPieceTwice) {
  gate_.cut_copies(100);
  const auto us = static_cast<pid_t>(syscall(SYS_gettid));
  std::atomic<bool> gone{false};
  driver_.on_call = [us, &gone](const DriverCall& call) {
    if (call.what != 0x1064 || call.thread == us) return CUDA_SUCCESS;
    gone = true;
    pthread_exit(nullptr);
  };
  ASSERT_TRUE(in(300));
  ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, kStream, 0)));
  ASSERT_TRUE(eventually([&] { return gone.load(); }));
  queue().drain(caller_, queue().pushed(), For::kSynchronise);
  EXPECT_THAT(driver_.story(), ElementsAre("copy_to_device 1000", "record e1"));
  EXPECT_EQ(queue().take_error(9), CUDA_ERROR_UNKNOWN);
}

// The head goes on, and the operation that overtook it counts as made.
TEST_F(PiecesTest, ALauncherThatEndsInAnOperationAheadOfItsTurnOwnsUpToIt) {
  gate_.cut_copies(100);
  gate_.only(Direction::kToHost);
  const auto us = static_cast<pid_t>(syscall(SYS_gettid));
  for (const std::string last : {"fill_8", "kernel", "copy_to_host"}) {
    SCOPED_TRACE(last);
    queue_ = std::make_unique<Queue>(gate_, +[]() noexcept { return false; });
    ASSERT_TRUE(queue().start());
    std::atomic<bool> gone{false};
    driver_.on_call = [us, &last, &gone](const DriverCall& call) {
      if (call.name != last || call.thread == us) return CUDA_SUCCESS;
      gone = true;
      pthread_exit(nullptr);
    };
    const std::size_t before = driver_.count();
    ASSERT_TRUE(in(200));
    ASSERT_TRUE(last == "kernel"   ? launch(kOtherStream)
                : last == "fill_8" ? queue().push_call(caller_, fill_of({0x3000, 0, 10, 1, 7, 1}, false, kOtherStream))
                                   : copy(0x7, 0x8, 200, Direction::kToHost, kOtherStream));
    ASSERT_TRUE(eventually([&] { return gone.load(); }));
    queue().drain(caller_, queue().pushed(), For::kSynchronise);
    EXPECT_EQ(driver_.count(), before + 1);
    EXPECT_EQ(driver_.story().back(), "copy_to_device 1000");
    EXPECT_EQ(queue().take_error(9), CUDA_ERROR_UNKNOWN);
  }
}

// Random histories over four streams that hand their memory to one another by events, with a gate that lets pieces go
// at random: as in program order, the memory holds the same bits.
TEST_F(PiecesTest, RandomHistoriesLeaveTheSameBits) {
  constexpr std::size_t kBytes = 4096;
  constexpr std::size_t kStreams = 4;
  const std::array streams{kStream, kOtherStream, kNonBlocking, handle<CUstream>(0x54)};
  driver_.on_call = [](const DriverCall& call) {
    if (call.name.starts_with("copy_to")) {
      std::memcpy(reinterpret_cast<void*>(call.what), reinterpret_cast<const void*>(call.values[0]), call.values[1]);
    } else if (call.name == "fill_8") {
      std::memset(reinterpret_cast<void*>(call.what), static_cast<int>(call.values[0]), call.values[1]);
    }
    return CUDA_SUCCESS;
  };
  using Memory = std::array<std::array<unsigned char, kBytes>, kStreams>;
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    gate_.cut_copies(1 + random() % 700, [chance = std::mt19937(seed)]() mutable { return chance() % 2 == 0; });
    Memory host{};
    Memory device{};
    for (auto& bytes : host)
      std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<unsigned char>(random()); });
    Memory host_expected = host;
    Memory device_expected = device;
    for (unsigned step = 0; step < 40; ++step) {
      const std::size_t mine = random() % kStreams;
      const std::size_t other = random() % kStreams;
      const std::size_t first = random() % kBytes;
      const std::size_t bytes = 1 + random() % (kBytes - first);
      CUstream const stream = streams[mine];
      switch (random() % 4) {
        case 0:
          ASSERT_TRUE(
              copy(address(&device[mine][first]), address(&host[mine][first]), bytes, Direction::kToDevice, stream));
          std::memcpy(&device_expected[mine][first], &host_expected[mine][first], bytes);
          break;
        case 1:
          ASSERT_TRUE(
              copy(address(&host[mine][first]), address(&device[mine][first]), bytes, Direction::kToHost, stream));
          std::memcpy(&host_expected[mine][first], &device_expected[mine][first], bytes);
          break;
        case 2:
          ASSERT_TRUE(queue().push_call(caller_,
                                        fill_of({address(&device[mine][first]), 0, bytes, 1, step, 1}, false, stream)));
          std::memset(&device_expected[mine][first], static_cast<int>(step), bytes);
          break;
        default:  // another stream's memory, between two events
          if (mine == other) break;
          ASSERT_TRUE(queue().push_call(caller_, record_of(kEvent, streams[other], 0)));
          ASSERT_TRUE(queue().push_call(caller_, wait_of(stream, kEvent, 0)));
          ASSERT_TRUE(
              copy(address(&host[mine][first]), address(&device[other][first]), bytes, Direction::kToHost, stream));
          ASSERT_TRUE(queue().push_call(caller_, record_of(kOtherEvent, stream, 0)));
          ASSERT_TRUE(queue().push_call(caller_, wait_of(streams[other], kOtherEvent, 0)));
          std::memcpy(&host_expected[mine][first], &device_expected[other][first], bytes);
      }
      if (random() % 8 == 0) {
        ASSERT_TRUE(launch(stream));
      }
    }
    finish();
    ASSERT_EQ(host, host_expected) << seed;
    ASSERT_EQ(device, device_expected) << seed;
  }
  EXPECT_GT(gate_.pieces().size(), 10'000U);
}

}  // namespace
}  // namespace cudasched::queue
