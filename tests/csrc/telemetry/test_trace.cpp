#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
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
