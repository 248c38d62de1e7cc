// Copies in pieces, over the simulated driver: which are cut, what another client's copy waits for, and the bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <vector>

#include "driver/driver.hpp"
#include "hooked_driver.hpp"
#include "other_client.hpp"
#include "runtime/engine.hpp"
#include "runtime/gate/copies.hpp"

namespace cudasched::test {
namespace {

using runtime::Copies;
using Direction = Copies::Direction;

constexpr std::size_t kPiece = Copies::kPieceBytes;
constexpr std::size_t kCopied = 2 * kPiece + 12'345;  // two whole pieces and a short one

class CopiesTest : public ::testing::Test {
 protected:
  CopiesTest() {
    const InRegion region(CUDASCHED_BEST_EFFORT);  // the process is a client of the device from here on
    Program::check(program_.launch(0));
    Program::check(program_.synchronize());
  }

  static CUdeviceptr on_device(std::size_t bytes) {
    CUdeviceptr address = 0;
    Program::check(call<decltype(cuMemAlloc)>("cuMemAlloc_v2")(&address, bytes));
    return address;
  }
  static std::byte* pinned(std::size_t bytes) {
    void* address = nullptr;
    Program::check(call<decltype(cuMemAllocHost)>("cuMemAllocHost_v2")(&address, bytes));
    return static_cast<std::byte*>(address);
  }
  // The calls of a program.
  CUresult in(CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream) const {
    return call<decltype(cuMemcpyHtoDAsync)>("cuMemcpyHtoDAsync_v2")(to, from, bytes, stream);
  }
  CUresult out(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) const {
    return call<decltype(cuMemcpyDtoHAsync)>("cuMemcpyDtoHAsync_v2")(to, from, bytes, stream);
  }
  CUresult any(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) const {
    return call<decltype(cuMemcpyAsync)>("cuMemcpyAsync")(to, from, bytes, stream);
  }
  static CUdeviceptr address(const void* at) { return reinterpret_cast<CUdeviceptr>(at); }

  // Pieces that copies() needs.
  template <typename Make>
  std::uint64_t pieces_of(Make&& make, CUstream stream) {
    const std::uint64_t before = state().copy_pieces;
    {
      const InRegion region(CUDASCHED_BEST_EFFORT);
      EXPECT_EQ(make(stream), CUDA_SUCCESS);
      EXPECT_EQ(program_.synchronize(stream), CUDA_SUCCESS);
    }
    return state().copy_pieces - before;
  }

  HookedDriver& driver_ = HookedDriver::instance();
  Program program_;
  std::byte* const host_ = pinned(kCopied);
  const CUdeviceptr device_ = on_device(kCopied);
};

TEST_F(CopiesTest, LongOnesBetweenPinnedMemoryAndTheDeviceAreCutBesideALatencyClient) {
  const auto copies_in = [&](CUstream stream) { return in(device_, host_, kCopied, stream); };
  EXPECT_EQ(pieces_of(copies_in, program_.stream()), 0U);
  const OtherClient other(/*active=*/false);
  EXPECT_EQ(pieces_of(copies_in, program_.stream()), 3U);
  EXPECT_EQ(pieces_of(copies_in, nullptr), 3U);
  EXPECT_EQ(pieces_of([&](CUstream s) { return out(host_, device_, kCopied, s); }, program_.stream()), 3U);
  EXPECT_EQ(pieces_of([&](CUstream s) { return any(device_, address(host_), kCopied, s); }, program_.stream()), 3U);
  EXPECT_EQ(pieces_of([&](CUstream s) { return any(address(host_), device_, kCopied, s); }, program_.stream()), 3U);
}

TEST_F(CopiesTest, TheyGoWholeWhereTheGpuInterruptsThemAndNotWhereItInterruptsKernelsAlone) {
  const OtherClient other(/*active=*/false);
  runtime::Gate* gate = nullptr;
  runtime::engine().for_each_device([&](runtime::Device& device) { gate = &device.gate; });
  const auto pieces = [&] {
    return pieces_of([&](CUstream stream) { return in(device_, host_, kCopied, stream); }, program_.stream());
  };
  gate->step_aside({.interrupted = true});
  EXPECT_EQ(pieces(), 3U);
  EXPECT_TRUE(eventually([&] {  // the ticker says otherwise at times
    gate->step_aside({.interrupted = true, .copies = true});
    return pieces() == 0;
  }));
}

TEST_F(CopiesTest, OthersGoWhole) {
  const OtherClient other(/*active=*/false);
  const auto whole = [&](auto&& make) { return pieces_of(make, program_.stream()) == 0; };
  EXPECT_TRUE(whole([&](CUstream s) { return in(device_, host_, kPiece, s); }));
  const CUdeviceptr second = on_device(kCopied);
  EXPECT_TRUE(whole([&](CUstream s) { return any(second, device_, kCopied, s); }));
  EXPECT_TRUE(whole([&](CUstream s) { return any(address(host_), address(pinned(kCopied)), kCopied, s); }));
  std::vector<std::byte> pageable(kCopied);
  EXPECT_TRUE(whole([&](CUstream s) { return in(device_, pageable.data(), kCopied, s); }));
  EXPECT_TRUE(whole([&](CUstream s) { return out(pageable.data(), device_, kCopied, s); }));
  EXPECT_TRUE(whole([&](CUstream) {  // the launcher has a per-thread stream of its own
    return call<decltype(cuMemcpyHtoDAsync)>("cuMemcpyHtoDAsync_v2_ptsz")(device_, host_, kCopied, nullptr);
  }));
}

TEST_F(CopiesTest, ACapturedCopyIsOneNode) {
  const OtherClient other(/*active=*/false);
  CUgraph graph = nullptr;
  EXPECT_EQ(pieces_of(
                [&](CUstream stream) {
                  Program::check(call<decltype(cuStreamBeginCapture)>("cuStreamBeginCapture_v2")(
                      stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
                  Program::check(in(device_, host_, kCopied, stream));
                  return call<decltype(cuStreamEndCapture)>("cuStreamEndCapture")(stream, &graph);
                },
                program_.stream()),
            0U);
  std::size_t nodes = 0;
  Program::check(call<decltype(cuGraphGetNodes)>("cuGraphGetNodes")(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 1U);
}

// The device copies in the order in which copies come.
TEST_F(CopiesTest, ARequestsCopyWaitsForPiecesAndNotForTheWholeOfALongCopy) {
  constexpr std::size_t kLong = 32 * kPiece;
  std::byte* const host = pinned(kLong);
  const CUdeviceptr device = on_device(kLong);
  CUstream const others = Program::new_stream();
  static std::atomic<int> ended{0};
  const auto note = +[](void* at) { static_cast<std::atomic<int>*>(at)->store(++ended); };
  auto* const call_back = call<decltype(cuLaunchHostFunc)>("cuLaunchHostFunc");
  const auto long_one_ended_first = [&] {
    std::atomic<int> long_one{0};
    std::atomic<int> requests{0};
    {
      const InRegion region(CUDASCHED_BEST_EFFORT);
      Program::check(in(device, host, kLong, program_.stream()));
      Program::check(call_back(program_.stream(), note, &long_one));
    }
    EXPECT_TRUE(eventually([&] {  // it has begun
      return driver::table().cuStreamQuery.legacy(program_.stream()) == CUDA_ERROR_NOT_READY || long_one != 0;
    }));
    Program::check(in(device_, host_, 1'000'000, others));
    Program::check(call_back(others, note, &requests));
    Program::check(program_.synchronize(others));
    Program::check(program_.synchronize());
    return long_one < requests;
  };
  EXPECT_TRUE(long_one_ended_first());
  const OtherClient other(/*active=*/false);
  bool overtaken = false;
  for (int turn = 0; turn < 20 && !overtaken; ++turn) overtaken = !long_one_ended_first();  // this thread may be late
  EXPECT_TRUE(overtaken);
}

// Streams that copy both ways and hand memory to one another by events, pieces of one between pieces of another.
TEST_F(CopiesTest, RandomHistoriesLeaveTheSameBits) {
  const OtherClient other(/*active=*/true);
  const std::uint64_t before = state().copy_pieces;
  constexpr std::size_t kStreams = 3;
  std::array<CUstream, kStreams> streams{};
  std::array<std::byte*, kStreams> host{};
  std::array<CUdeviceptr, kStreams> device{};
  std::array<std::vector<std::byte>, kStreams> expected_host;
  std::array<std::vector<std::byte>, kStreams> expected_device;
  std::mt19937 random(42);
  auto* const create = call<decltype(cuEventCreate)>("cuEventCreate");
  auto* const record = call<decltype(cuEventRecord)>("cuEventRecord");
  auto* const wait = call<decltype(cuStreamWaitEvent)>("cuStreamWaitEvent");
  CUevent event = nullptr;
  Program::check(create(&event, CU_EVENT_DISABLE_TIMING));
  for (std::size_t i = 0; i < kStreams; ++i) {
    streams[i] = Program::new_stream();
    host[i] = pinned(kCopied);
    device[i] = on_device(kCopied);
    std::generate_n(host[i], kCopied, [&] { return static_cast<std::byte>(random()); });
    expected_host[i].assign(host[i], host[i] + kCopied);
    expected_device[i].resize(kCopied);
    std::fill_n(reinterpret_cast<std::byte*>(device[i]), kCopied,
                std::byte{});  // NOLINT: the device's memory is the host's
  }
  {
    const InRegion region(CUDASCHED_BEST_EFFORT);
    for (int step = 0; step < 60; ++step) {
      const std::size_t mine = random() % kStreams;
      const std::size_t from = random() % kStreams;
      const std::size_t first = random() % (kCopied / 4);
      const std::size_t bytes = random() % 4 == 0 ? 1 + random() % 1000 : kCopied - first - random() % 1000;
      const auto source = static_cast<std::ptrdiff_t>(first);
      const auto count = static_cast<std::ptrdiff_t>(bytes);
      if (random() % 2 == 0) {
        Program::check(in(device[mine] + first, host[mine] + first, bytes, streams[mine]));
        std::copy_n(expected_host[mine].begin() + source, count, expected_device[mine].begin() + source);
        continue;
      }
      Program::check(record(event, streams[from]));
      Program::check(wait(streams[mine], event, 0));
      Program::check(out(host[mine] + first, device[from] + first, bytes, streams[mine]));
      Program::check(record(event, streams[mine]));
      Program::check(wait(streams[from], event, 0));
      std::copy_n(expected_device[from].begin() + source, count, expected_host[mine].begin() + source);
    }
    for (CUstream const stream : streams) Program::check(program_.synchronize(stream));
  }
  EXPECT_GT(state().copy_pieces, before + 60);
  for (std::size_t i = 0; i < kStreams; ++i) {
    EXPECT_TRUE(std::equal(expected_host[i].begin(), expected_host[i].end(), host[i])) << i;
    EXPECT_TRUE(
        std::equal(expected_device[i].begin(), expected_device[i].end(), reinterpret_cast<std::byte*>(device[i])));
  }
}

TEST_F(CopiesTest, ItsContextMayGoAndComeAgain) {
  const OtherClient other(/*active=*/false);
  const auto copies_in = [&](CUstream stream) { return in(device_, host_, kCopied, stream); };
  EXPECT_EQ(pieces_of(copies_in, program_.stream()), 3U);
  CUcontext second = nullptr;
  Program::check(call<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&second, 0, 0));
  EXPECT_EQ(pieces_of(copies_in, Program::new_stream()), 0U);  // the events are the first one's
  Program::check(call<CUresult(CUcontext)>("cuCtxDestroy_v2")(second));
  program_.use_on_this_thread();
  Program::check(call<CUresult(CUdevice)>("cuDevicePrimaryCtxReset_v2")(0));
  const Program anew;
  std::byte* const host = pinned(kCopied);
  const CUdeviceptr device = on_device(kCopied);
  EXPECT_EQ(pieces_of([&](CUstream stream) { return in(device, host, kCopied, stream); }, anew.stream()), 3U);
}

TEST_F(CopiesTest, EventsAreOfOneContext) {
  Copies copies;
  EXPECT_TRUE(copies.ready(program_.context()));
  auto* const other = reinterpret_cast<CUcontext>(std::uintptr_t{8});
  EXPECT_FALSE(copies.ready(other));
  copies.forget(other);
  EXPECT_TRUE(copies.ready(program_.context()));
  copies.forget(nullptr);
}

// ---- how many are outstanding

class OutstandingTest : public CopiesTest {
 protected:
  OutstandingTest() {
    EXPECT_TRUE(copies_.ready(program_.context()));
    Program::check(program_.launch(1, stream_, 50'000));  // a second, ahead of all that comes
  }
  ~OutstandingTest() override {
    EXPECT_EQ(program_.synchronize(stream_), CUDA_SUCCESS);
    copies_.forget(nullptr);
  }

  CUstream stream_ = Program::new_stream();
  Copies copies_;
};

TEST_F(OutstandingTest, TwoPiecesOfADirectionAndOneBesideARequest) {
  EXPECT_EQ(copies_.next(Direction::kToDevice, 3 * kPiece, true, 1), kPiece);
  copies_.submitted(Direction::kToDevice, stream_, 1);
  EXPECT_EQ(copies_.next(Direction::kToDevice, 2 * kPiece, true, 2), 0U);
  EXPECT_EQ(copies_.next(Direction::kToDevice, 2 * kPiece, false, 2), kPiece);
  copies_.submitted(Direction::kToDevice, stream_, 2);
  EXPECT_EQ(copies_.next(Direction::kToDevice, kPiece, false, 3), 0U);
  EXPECT_EQ(copies_.next(Direction::kToHost, 5, false, 3), 5U);  // the other direction is by itself
}

TEST_F(OutstandingTest, APieceThatDoesNotEndHoldsTheRestNoLongerThanTheBackstop) {
  copies_.submitted(Direction::kToHost, stream_, 1'000);
  copies_.submitted(Direction::kToHost, stream_, 2'000);
  EXPECT_EQ(copies_.next(Direction::kToHost, 9 * kPiece, false, 1'000 + Copies::kLongestNs), 0U);
  EXPECT_EQ(copies_.next(Direction::kToHost, 9 * kPiece, false, 1'001 + Copies::kLongestNs), 9 * kPiece);
}

}  // namespace
}  // namespace cudasched::test
