// Several processes on one simulated device: fair shares, exactly-once effects, death at any moment.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <chrono>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "simulated_driver/fixture.hpp"

extern char** environ;  // NOLINT

namespace cudasched::simulated_driver {
namespace {

// A running worker.cpp; killed at the end of the scope if it still lives.
class Worker {
 public:
  explicit Worker(std::vector<std::string> arguments) {
    device_directory();
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    arguments.insert(arguments.begin(), SIMULATE_WORKER);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&pid_, SIMULATE_WORKER, &actions, nullptr, pointers.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    output_ = ends[0];
  }

  ~Worker() {
    kill_now();
    close(output_);
  }

  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::string line() {
    std::string text;
    for (char c = 0; read(output_, &c, 1) == 1 && c != '\n';) text += c;
    return text;
  }

  void kill_now() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  int wait() {
    int status = -1;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_ = -1;
  int output_ = -1;
};

using ProcessesTest = DoubleTest;

TEST_F(ProcessesTest, EachRunsItsEffectsOnceAndInOrder) {
  Worker a({"appends", "3000", "5"});
  Worker b({"appends", "3000", "7"});
  Worker c({"appends", "2000", "11"});
  EXPECT_EQ(a.line(), "done 3000");
  EXPECT_EQ(b.line(), "done 3000");
  EXPECT_EQ(c.line(), "done 2000");
  EXPECT_EQ(a.wait(), 0);
  EXPECT_EQ(b.wait(), 0);
  EXPECT_EQ(c.wait(), 0);
}

TEST_F(ProcessesTest, ABusyNeighbourDoesNotStarveUs) {
  Worker busy({"forever", "200"});
  ASSERT_EQ(busy.line(), "ready");
  for (std::uint64_t i = 0; i < 40; ++i) {
    ASSERT_EQ(append(nullptr, i, 100), CUDA_SUCCESS);
    ASSERT_EQ(cuStreamSynchronize(nullptr), CUDA_SUCCESS);
  }
  EXPECT_EQ(log().size(), 40U);
}

TEST_F(ProcessesTest, AKilledProcessLeavesTheDeviceFree) {
  // It holds the whole device with 2000 s of work; alone, our kernel would get its turn anyway: what must come back is
  // its context. There are 64, so more than that can only come and go if each is given back.
  for (int round = 0; round < 70; ++round) {
    Worker hog({"contexts"});
    ASSERT_EQ(hog.line(), "ready") << "round " << round;
    hog.kill_now();
  }
  ASSERT_EQ(append(nullptr, 1, 10), CUDA_SUCCESS);
  EXPECT_EQ(log(), std::vector<std::uint64_t>{1});
}

// Killed at random moments, many of them inside the lock or inside an update, while this process goes on working.
TEST_F(ProcessesTest, RandomKillsNeverHarmTheSurvivors) {
  std::mt19937_64 random(5);
  std::uint64_t appended = 0;
  const CUstream streams[] = {stream(), stream(CU_STREAM_DEFAULT)};
  for (int round = 0; round < 60; ++round) {
    Worker a({"forever", "3"});
    Worker b({"forever", "50"});
    ASSERT_EQ(a.line(), "ready");
    ASSERT_EQ(b.line(), "ready");
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 15'000);
    while (std::chrono::steady_clock::now() < until) {
      for (int i = 0; i < 10 && appended < kLogEntries; ++i, ++appended) {
        ASSERT_EQ(append(streams[i % 2], appended, 1), CUDA_SUCCESS);
      }
      cuStreamQuery(streams[0]);
    }
    a.kill_now();
    if (round % 2 == 0) {
      ASSERT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
    }
    b.kill_now();
  }
  const std::vector<std::uint64_t> entries = log();
  ASSERT_EQ(entries.size(), appended);
  EXPECT_EQ(std::set<std::uint64_t>(entries.begin(), entries.end()).size(), appended) << "each of ours exactly once";
}

// The same with a neighbour that is nearly always inside the lock, moving our operations along with its own.
TEST_F(ProcessesTest, KillsInsideTheLockNeverHarmTheSurvivors) {
  std::mt19937_64 random(6);
  std::uint64_t appended = 0;
  const CUstream streams[] = {stream(), stream(CU_STREAM_DEFAULT), stream()};
  const CUevent mark = event();
  for (int round = 0; round < 150; ++round) {
    Worker worker({"inside"});
    ASSERT_EQ(worker.line(), "ready");
    for (std::uint64_t i = 0; i < 20; ++i, ++appended) {
      ASSERT_EQ(append(streams[i % 3], appended, 1 + static_cast<std::uint32_t>(random() % 50)), CUDA_SUCCESS);
      ASSERT_EQ(cuEventRecord(mark, streams[i % 3]), CUDA_SUCCESS);
      ASSERT_EQ(cuStreamWaitEvent(streams[(i + 1) % 3], mark, 0), CUDA_SUCCESS);
    }
    usleep(static_cast<useconds_t>(random() % 2000));
    worker.kill_now();
  }
  const std::vector<std::uint64_t> entries = log();
  ASSERT_EQ(entries.size(), appended);
  for (std::uint64_t i = 0; i < appended; ++i) ASSERT_EQ(entries[i], i) << "each once, in the order of the events";
}

TEST_F(ProcessesTest, AStoppedProcessThatHoldsNothingStopsNobody) {
  Worker hog({"contexts"});
  ASSERT_EQ(hog.line(), "ready");  // it sleeps from here on, its work queued
  ASSERT_EQ(append(nullptr, 1, 10), CUDA_SUCCESS);
  EXPECT_EQ(log(), std::vector<std::uint64_t>{1});
}

// ---- opening the device, in processes of their own

int run_worker(const std::string& variable, const std::string& value) {
  device_directory();
  const char* before = getenv(variable.c_str());
  const std::string old = before == nullptr ? "" : before;
  setenv(variable.c_str(), value.c_str(), 1);
  Worker worker({"appends", "3", "1"});
  if (before == nullptr) {
    unsetenv(variable.c_str());
  } else {
    setenv(variable.c_str(), old.c_str(), 1);
  }
  return worker.wait();
}

TEST(Opening, BadSettingsAreRefused) {
  EXPECT_EQ(run_worker("CUDASCHED_SIM_SCALE", "fast"), 3);
  EXPECT_EQ(run_worker("CUDASCHED_SIM_SCALE", "0"), 3);
  EXPECT_EQ(run_worker("CUDASCHED_SIM_DEVICES", "-1"), 3);
  EXPECT_EQ(run_worker("CUDASCHED_SIM_DEVICES", "0"), 3);
  EXPECT_EQ(run_worker("CUDASCHED_SIM_DEVICES", "2"), 0);
  EXPECT_EQ(run_worker("CUDASCHED_SIM_DRIVER_VERSION", "x"), 3);
}

TEST(Opening, BadDirectoriesAreRefused) {
  const std::string base = device_directory();
  EXPECT_EQ(run_worker("CUDASCHED_SIM_DIR", base + "/missing/deeper"), 3);
  const std::string open_to_all = base + "/open";
  ASSERT_EQ(mkdir(open_to_all.c_str(), 0700), 0);
  ASSERT_EQ(chmod(open_to_all.c_str(), 0777), 0);
  EXPECT_EQ(run_worker("CUDASCHED_SIM_DIR", open_to_all), 3);
  const std::string file = base + "/file";
  std::ofstream(file) << "x";
  EXPECT_EQ(run_worker("CUDASCHED_SIM_DIR", file), 3);
}

TEST(Opening, AnOldOrBrokenFileThatNobodyUsesIsReplaced) {
  const std::string directory = device_directory() + "/stale";
  ASSERT_EQ(mkdir(directory.c_str(), 0700), 0);
  std::ofstream(directory + "/device-0") << "not a device";
  EXPECT_EQ(run_worker("CUDASCHED_SIM_DIR", directory), 0);
  EXPECT_EQ(run_worker("CUDASCHED_SIM_DIR", directory), 0);
}

}  // namespace
}  // namespace cudasched::simulated_driver
