#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "driver/functions.hpp"
#include "private_directory.hpp"
#include "telemetry/journal.hpp"
#include "telemetry/trace.hpp"
#include "telemetry/trace_file.hpp"

namespace cudasched::telemetry {
namespace {

namespace fs = std::filesystem;

struct Block {
  std::uint32_t kind = 0;
  std::uint32_t records = 0;
  std::string payload;
};

// The blocks of a file; what follows the last whole one is left out.
std::vector<Block> blocks_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string data{std::istreambuf_iterator<char>(file), {}};
  std::vector<Block> found;
  EXPECT_EQ(data.substr(0, 8), "CSDTRACE");
  std::size_t at = 16;
  while (at + 24 <= data.size()) {
    Block block;
    std::uint64_t bytes = 0;
    std::uint32_t crc = 0;
    EXPECT_EQ(data.substr(at, 4), "TBLK");
    std::memcpy(&block.kind, &data[at + 4], 4);
    std::memcpy(&bytes, &data[at + 8], 8);
    std::memcpy(&block.records, &data[at + 16], 4);
    std::memcpy(&crc, &data[at + 20], 4);
    if (at + 24 + bytes > data.size()) break;
    block.payload = data.substr(at + 24, bytes);
    EXPECT_EQ(crc32(0, bytes_of(block.payload)), crc);
    found.push_back(block);
    at += 24 + bytes;
  }
  return found;
}

std::vector<fs::path> files_of(const std::string& directory) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(directory)) found.push_back(entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<TraceRecord> records_of(const std::string& directory) {
  std::vector<TraceRecord> found;
  for (const fs::path& path : files_of(directory)) {
    for (const Block& block : blocks_of(path)) {
      if (block.kind != 3) continue;
      std::vector<TraceRecord> some(block.records);
      EXPECT_EQ(block.payload.size(), some.size() * sizeof(TraceRecord));
      std::memcpy(some.data(), block.payload.data(), block.payload.size());
      found.insert(found.end(), some.begin(), some.end());
    }
  }
  return found;
}

TraceRecord counter(std::uint64_t value, std::uint16_t thread = 1) {
  TraceRecord record;
  record.kind = TraceKind::kCounter;
  record.time_ns = now_ns();
  record.what = value;
  record.thread = thread;
  return record;
}

TEST(Trace, WritesWhatWasPutAndWhatItIsCalled) {
  const test::PrivateDirectory directory;
  driver::KernelFacts kernel;
  kernel.facts.index = 41;
  kernel.name = "a \"kernel\"\n";
  const std::uint16_t region = trace_region("a 'region'", Class::kLatency);
  EXPECT_EQ(trace_region("a 'region'", Class::kLatency), region);
  EXPECT_NE(trace_region("a 'region'", Class::kNormal), region);
  EXPECT_FALSE(tracing());
  put(counter(7));  // nothing is traced yet
  start_tracing({directory.path()});
  EXPECT_TRUE(tracing());
  EXPECT_THROW(start_tracing({directory.path()}), Error) << "one at a time";
  TraceRecord launch = counter(reinterpret_cast<std::uintptr_t>(&kernel));
  launch.kind = TraceKind::kLaunch;
  launch.region = region;
  put(launch);
  TraceRecord graph = counter(0xABCD'EF01'2345'6789);
  graph.kind = TraceKind::kLaunch;
  graph.detail = kTraceGraph;
  put(graph);
  const Traced done = stop_tracing();
  EXPECT_FALSE(tracing());
  EXPECT_EQ(done.records, 2U);
  EXPECT_EQ(done.dropped, 0U);
  EXPECT_TRUE(stop_tracing().base.empty()) << "nothing is to be stopped";

  const std::vector<TraceRecord> records = records_of(directory.path());
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0].what, 42U) << "its number";
  EXPECT_EQ(records[1].what, 0xABCD'EF01'2345'6789) << "its handle";
  const std::vector<Block> blocks = blocks_of(files_of(directory.path()).at(0));
  EXPECT_EQ(blocks.front().kind, 1U);
  EXPECT_EQ(blocks.back().kind, 5U);
  std::string texts;
  for (const Block& block : blocks) texts += block.kind == 2 ? block.payload : "";
  EXPECT_NE(texts.find(kernel.name), std::string::npos);
  EXPECT_NE(texts.find(std::string("latency\0a 'region'", 18)), std::string::npos);
}

// The texts of a space, by number, of the blocks.
std::map<std::uint32_t, std::string> texts_of(const std::vector<Block>& blocks, std::uint32_t space) {
  std::map<std::uint32_t, std::string> found;
  for (const Block& block : blocks) {
    for (std::size_t at = 0; block.kind == 2 && at + 12 <= block.payload.size();) {
      std::array<std::uint32_t, 3> head{};
      std::memcpy(head.data(), &block.payload[at], sizeof head);
      if (head[0] == space) found[head[1]] = block.payload.substr(at + 12, head[2]);
      at += 12 + head[2];
    }
  }
  return found;
}

TEST(Trace, TheShapesOfLaunchesAreWrittenOnceWithTheirNumbers) {
  const test::PrivateDirectory directory;
  trace_device({.ordinal = 5, .major = 9, .minor = 0, .sm_count = 132, .max_threads_per_sm = 2048});
  trace_device({.ordinal = 5, .major = 1, .minor = 1, .sm_count = 1, .max_threads_per_sm = 1});  // told already
  driver::KernelFacts kernel;
  kernel.facts.index = 6;
  kernel.facts.registers = 40;
  kernel.facts.local_bytes = 8;
  kernel.facts.static_shared_bytes = 1024;
  kernel.facts.max_threads = 512;
  kernel.name = "kernel";
  predict::Launch small;
  small.block[0] = 96;
  predict::Launch largest;
  std::copy_n(std::array{0x7FFF'FFFFU, 65'535U, 65'535U}.begin(), 3, largest.grid);
  std::copy_n(std::array{1024U, 1024U, 64U}.begin(), 3, largest.block);
  std::copy_n(std::array{16U, 1U, 2U}.begin(), 3, largest.cluster);
  largest.dynamic_shared_bytes = 227 << 10;
  start_tracing({directory.path(), /*limit_bytes=*/1});
  const auto launch = [&](std::uint16_t shape) {
    TraceRecord record = counter(reinterpret_cast<std::uintptr_t>(&kernel));
    record.kind = TraceKind::kLaunch;
    record.has_shape(shape);
    put(record);
  };
  for (const predict::Launch& what : {small, largest, small}) launch(trace_shape(what));
  launch(0);
  stop_tracing();
  std::vector<std::uint64_t> numbers;
  for (const TraceRecord& record : records_of(directory.path())) {
    EXPECT_EQ(record.what & UINT32_MAX, 7U);
    numbers.push_back(record.what >> 32);
  }
  ASSERT_EQ(numbers.size(), 4U);
  EXPECT_EQ(numbers[0], numbers[2]);
  EXPECT_NE(numbers[0], numbers[1]);
  EXPECT_EQ(numbers[3], 0U);
  const std::vector<Block> blocks = blocks_of(files_of(directory.path()).at(0));
  std::map<std::uint32_t, std::string> shapes{{numbers[0], "1 1 1 96 1 1 1 1 1 0"}};
  shapes[static_cast<std::uint32_t>(numbers[1])] = "2147483647 65535 65535 1024 1024 64 16 1 2 232448";
  EXPECT_EQ(texts_of(blocks, 2), shapes);
  EXPECT_EQ(texts_of(blocks, 0).at(7), std::string("kernel") + '\0' + '\0' + "40 8 1024 512");
  EXPECT_EQ(texts_of(blocks, 3).at(5), "9 0 132 2048");
}

// Each number stands for one shape, of whichever thread; a shape that finds no place has none.
TEST(TraceShapes, GivesNumbersToManyThreadsUntilItIsFull) {
  const auto shapes = std::make_unique<TraceShapes>();
  constexpr std::uint32_t kEach = 10'000;
  const auto shape = [](std::uint32_t grid) {
    predict::Launch what;
    what.grid[0] = grid;
    what.dynamic_shared_bytes = ~grid;  // a shape that is torn shows
    return TraceShape(what);
  };
  EXPECT_EQ(shapes->number_of(shape(1)), shapes->number_of(shape(1)));
  std::vector<std::thread> threads;
  std::atomic<std::uint32_t> with{0};
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (std::uint32_t grid = 1; grid <= kEach; ++grid) {
        const std::uint16_t number = shapes->number_of(shape(grid));
        ASSERT_LE(number, TraceShapes::kPlaces);
        if (number == 0) continue;
        with.fetch_add(1);
        ASSERT_EQ(shapes->shape(number), shape(grid));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(with, TraceShapes::kPlaces / 2);
  EXPECT_LT(with, 4 * kEach) << "there are more shapes than places";
  EXPECT_NE(shapes->number_of(shape(1)), 0U) << "those that have a place keep it";
}

TEST(Trace, StaysWithinItsLimitAndEachFileIsComplete) {
  const test::PrivateDirectory directory;
  start_tracing({directory.path(), /*limit_bytes=*/1});  // the least that there is
  constexpr std::uint64_t kRecords = 60'000;
  for (std::uint64_t i = 0; i < kRecords; ++i) {
    put(counter(i));
    if (i % 1000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const Traced done = stop_tracing();
  EXPECT_EQ(done.records + done.dropped, kRecords);
  const std::vector<fs::path> files = files_of(directory.path());
  EXPECT_LE(files.size(), TraceFile::kFiles);
  EXPECT_GT(files.size(), 1U);
  for (const fs::path& path : files) {
    EXPECT_EQ(blocks_of(path).at(0).kind, 1U) << path;
    EXPECT_LE(fs::file_size(path), 66'000U) << path;
  }
  const std::vector<TraceRecord> records = records_of(directory.path());
  EXPECT_EQ(records.size() + done.rotated_away, done.records);
  EXPECT_TRUE(std::is_sorted(records.begin(), records.end(), [](auto& a, auto& b) { return a.what < b.what; }));
  EXPECT_GE(records.front().what, done.rotated_away) << "the newest are kept";
}

// As of a program in a container, whose process has the same number each time.
TEST(Trace, DoesNotGoOnWithTheFilesOfAnEarlierOne) {
  const test::PrivateDirectory directory;
  const auto trace = [&] {
    start_tracing({directory.path(), /*limit_bytes=*/1});
    for (std::uint64_t i = 0; i < 30'000; ++i) {
      put(counter(i));
      if (i % 1000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return stop_tracing();
  };
  const Traced first = trace();
  EXPECT_GT(first.rotated_away, 0U);
  const Traced second = trace();
  EXPECT_NE(first.base, second.base);
  EXPECT_GT(second.rotated_away, 0U);
}

TEST(Trace, NamesBeyondTheirPlacesShareTheLastOne) {
  std::uint16_t last = 0;
  for (int i = 0; i < kMostRegions + 10; ++i) last = trace_region("name " + std::to_string(i), Class::kNormal);
  EXPECT_EQ(last, kMostRegions);
  EXPECT_EQ(trace_region(std::string(10'000, 'x'), Class::kNormal), kMostRegions);
}

TEST(Trace, ADirectoryThatCannotBeWrittenToIsSaid) {
  try {
    start_tracing({"/nowhere/at all"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("/nowhere/at all"), std::string::npos) << error.what();
  }
  EXPECT_FALSE(tracing());
  const test::PrivateDirectory directory;
  start_tracing({directory.path()});
  stop_tracing();
}

// In a process of its own: what limits it lasts.
template <typename Body>
int status_of(Body&& body) {
  const pid_t child = fork();
  if (child == 0) {
    reset_tracing_in_child();
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST(Trace, OfAFullDiskWhatWasWrittenIsKept) {
  const test::PrivateDirectory directory;
  const int status = status_of([&] {
    signal(SIGXFSZ, SIG_IGN);
    rlimit limit{400'000, 400'000};
    setrlimit(RLIMIT_FSIZE, &limit);
    start_tracing({directory.path()});
    for (std::uint64_t i = 0; i < 20'000; ++i) {
      put(counter(i));
      if (i % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const Traced done = stop_tracing();
    _exit(done.records > 0 && done.dropped > 0 && done.records + done.dropped == 20'000 ? 0 : 1);
  });
  EXPECT_EQ(status, 0);
  const std::vector<TraceRecord> records = records_of(directory.path());
  ASSERT_FALSE(records.empty());
  for (std::size_t i = 0; i < records.size(); ++i) EXPECT_EQ(records[i].what, i);
}

TEST(Trace, AProcessThatIsKilledLeavesWhatWasWritten) {
  const test::PrivateDirectory directory;
  const int status = status_of([&] {
    start_tracing({directory.path()});
    for (std::uint64_t i = 0; i < 100; ++i) put(counter(i));
    while (records_of(directory.path()).empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    kill(getpid(), SIGKILL);
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_FALSE(records_of(directory.path()).empty());
}

TEST(Trace, AForkedChildTracesIntoAFileOfItsOwn) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer lets no forked child of a process with threads start one";
#endif
  const test::PrivateDirectory directory;
  start_tracing({directory.path()});
  put(counter(1));
  // Its thread is past its start: AddressSanitizer's allocator stays locked in a child that is forked meanwhile.
  while (records_of(directory.path()).empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(status_of([&] {
              if (tracing()) _exit(1);
              put(counter(2));  // nowhere
              start_tracing({directory.path()});
              put(counter(3));
              stop_tracing();
            }),
            0);
  put(counter(4));
  stop_tracing();
  EXPECT_EQ(files_of(directory.path()).size(), 2U);
  std::multimap<std::uint64_t, int> found;
  for (const TraceRecord& record : records_of(directory.path())) found.emplace(record.what, 0);
  EXPECT_EQ(found.size(), 3U);
  EXPECT_EQ(found.count(2), 0U);
}

}  // namespace
}  // namespace cudasched::telemetry
