#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/log_limit.hpp"
#include "private_directory.hpp"

namespace cudasched::log {
namespace {

using ::testing::internal::CaptureStderr;
using ::testing::internal::GetCapturedStderr;

std::string all_levels() {
  CaptureStderr();
  error("e");
  warning("w");
  info("i");
  write(Level::kDebug, "d");
  return GetCapturedStderr();
}

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// One test: what was chosen holds for the process.
TEST(Log, TheLevelIsTheEnvironmentsUntilOneIsSet) {
  unsetenv("CUDASCHED_LOG");
  const std::string two = "cudasched: error: e\ncudasched: warning: w\n";
  EXPECT_EQ(all_levels(), two);
  setenv("CUDASCHED_LOG", "error", 1);
  EXPECT_EQ(all_levels(), "cudasched: error: e\n");
  setenv("CUDASCHED_LOG", "loud", 1);
  EXPECT_EQ(all_levels(), two);

  EXPECT_THROW(set_level("loud"), ConfigError);
  EXPECT_EQ(all_levels(), two);
  set_level("debug");
  setenv("CUDASCHED_LOG", "error", 1);
  EXPECT_EQ(all_levels(), two + "cudasched: info: i\ncudasched: debug: d\n");
  set_level("warning");
  EXPECT_EQ(all_levels(), two);
  try {
    set_level("");
    ADD_FAILURE() << "an empty name is a level";
  } catch (const ConfigError& refused) {
    EXPECT_NE(std::string(refused.what()).find("error, warning, info or debug"), std::string::npos);
  }
  unsetenv("CUDASCHED_LOG");
}

TEST(Log, NothingInAMessageIsAnOrderToTheTerminal) {
  CaptureStderr();
  error("a name: \x1b[2J\x7f and\nmore\ttext, \u009b2J, \u00e9");
  EXPECT_EQ(GetCapturedStderr(), "cudasched: error: a name: ?[2J? and more text, ??2J, \u00e9\n");
}

// ---- the form

std::string formatted(Level level, std::string_view message, std::int64_t realtime_ns, int pid = 4711,
                      std::size_t room = 1024) {
  std::vector<char> line(room);
  return {line.data(), format(line.data(), room, level, message, realtime_ns, pid)};
}

TEST(Log, AFilesLineBeginsWithTimeAndProcess) {
  constexpr std::int64_t kMoment = 1'795'413'618'123'999'999;
  EXPECT_EQ(formatted(Level::kInfo, "text", kMoment), "2026-11-23T06:00:18.123Z 4711 cudasched: info: text\n");
  EXPECT_EQ(formatted(Level::kError, "text", 0), "1970-01-01T00:00:00.000Z 4711 cudasched: error: text\n");
  EXPECT_EQ(formatted(Level::kDebug, "leap", 951'782'400'000'000'000),
            "2000-02-29T00:00:00.000Z 4711 cudasched: debug: leap\n");
  EXPECT_EQ(formatted(Level::kWarning, "text", -1), "cudasched: warning: text\n");
}

TEST(Log, ALineIsOneLineHoweverLongTheMessageAndHoweverLittleTheRoom) {
  const std::string line = formatted(Level::kWarning, std::string(5000, 'x'), -1);
  EXPECT_EQ(line.size(), 1023U);
  EXPECT_EQ(line.back(), '\n');
  EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1);
  for (std::size_t room = 2; room < 64; ++room) {
    const std::string cut = formatted(Level::kWarning, "message", 0, 4711, room);
    ASSERT_LT(cut.size(), room);
    ASSERT_EQ(cut.back(), '\n');
  }
}

// ---- the limit

TEST(LogLimit, SomeAtOnceAndThenOneAnInterval) {
  Limit limit(3, 100);
  EXPECT_TRUE(limit.admit(1000));
  EXPECT_TRUE(limit.admit(1000));
  EXPECT_TRUE(limit.admit(1000));
  EXPECT_FALSE(limit.admit(1000));
  EXPECT_FALSE(limit.admit(1099));
  EXPECT_TRUE(limit.admit(1100));
  EXPECT_FALSE(limit.admit(1101));
  EXPECT_EQ(limit.take_left_out(), 3U);
  EXPECT_EQ(limit.take_left_out(), 0U);
  EXPECT_TRUE(limit.admit(10'000));
  EXPECT_TRUE(limit.admit(10'000));
  EXPECT_TRUE(limit.admit(10'000));
  EXPECT_FALSE(limit.admit(10'000));
}

TEST(LogLimit, AClockThatBeginsAtZeroOrBelowIsAsGood) {
  for (const std::int64_t now : {std::int64_t{0}, std::int64_t{-5'000'000'000}}) {
    Limit limit(1, 1'000'000'000);
    EXPECT_TRUE(limit.admit(now));
    EXPECT_FALSE(limit.admit(now));
    EXPECT_TRUE(limit.admit(now + 1'000'000'000));
  }
}

TEST(LogLimit, ThreadsShareIt) {
  Limit limit(100, 1'000'000'000);
  std::atomic<int> admitted{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 1000; ++j) admitted += limit.admit(0) ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(admitted, 100);
  EXPECT_EQ(limit.take_left_out(), 3900U);
}

TEST(Log, AFloodIsCutShort) {
  CaptureStderr();
  for (int i = 0; i < 20'000; ++i) error("again and again");
  const std::string said = GetCapturedStderr();
  const auto lines = std::count(said.begin(), said.end(), '\n');
  EXPECT_GE(lines, 10);      // other tests of this process have had some
  EXPECT_LT(lines, 10'000);  // one a second is written besides; nothing takes hours
}

// ---- where lines go

class LogFile : public ::testing::Test {
 protected:
  void TearDown() override { set_file(""); }

  test::PrivateDirectory directory_;
  const std::string path_ = directory_.path() + "/log";
};

TEST_F(LogFile, TheEnvironmentNamesItUntilOneIsSet) {
  // In a child: nothing was set in it.
  const pid_t child = fork();
  if (child == 0) {
    setenv("CUDASCHED_LOG_FILE", path_.c_str(), 1);
    warning("one");
    set_file("");
    CaptureStderr();
    warning("two");
    const bool on_stderr = GetCapturedStderr() == "cudasched: warning: two\n";
    set_file(path_ + "2");
    warning("three");
    _exit(on_stderr ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_NE(content(path_).find(" cudasched: warning: one\n"), std::string::npos);
  EXPECT_EQ(content(path_).find("two"), std::string::npos);
  EXPECT_NE(content(path_ + "2").find(" " + std::to_string(child) + " cudasched: warning: three\n"), std::string::npos);
  struct stat about {};
  ASSERT_EQ(stat(path_.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0600U);
}

TEST_F(LogFile, AParentAndItsChildrenWriteWholeLines) {
  set_file(path_);
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      for (int j = 0; j < 5; ++j) info("not written");
      for (int j = 0; j < 5; ++j) warning("of a child");
      _exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  std::ifstream file(path_);
  int lines = 0;
  for (std::string line; std::getline(file, line); ++lines) {
    EXPECT_EQ(line.find(" cudasched: warning: of a child"),
              line.size() - std::strlen(" cudasched: warning: of a child"));
  }
  EXPECT_EQ(lines, 20);
  for (const pid_t child : children) {
    EXPECT_NE(content(path_).find(" " + std::to_string(child) + " "), std::string::npos);
  }
}

TEST_F(LogFile, WhereItCannotBeWrittenStandardErrorGetsTheLine) {
  const std::string fifo = directory_.path() + "/fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const std::vector<std::string> paths{"/dev/full", "/nowhere/log", directory_.path(), fifo};
  for (const std::string& path : paths) {
    set_file(path);
    CaptureStderr();
    warning("text");
    EXPECT_EQ(GetCapturedStderr(), "cudasched: warning: text\n") << path;
  }
  EXPECT_THROW(set_file(std::string(5000, 'x')), ConfigError);
}

TEST_F(LogFile, AFileThatIsMovedAwayIsMadeAnew) {
  set_file(path_);
  warning("one");
  ASSERT_EQ(rename(path_.c_str(), (path_ + ".1").c_str()), 0);
  warning("two");
  EXPECT_NE(content(path_ + ".1").find("one"), std::string::npos);
  EXPECT_NE(content(path_).find("two"), std::string::npos);
}

// Runs something in a child whose standard error it may spoil. Returns the child's status.
int in_a_child(void (*action)()) {
  const pid_t child = fork();
  if (child == 0) {
    action();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(Log, AClosedStandardErrorIsNoFault) {
  EXPECT_EQ(in_a_child([] {
              close(STDERR_FILENO);
              errno = 7;
              error("text");
              if (errno != 7) _exit(1);
            }),
            0);
}

TEST(Log, AFullStandardErrorIsNoFault) {
  EXPECT_EQ(in_a_child([] {
              dup2(open("/dev/full", O_WRONLY), STDERR_FILENO);
              error("text");
            }),
            0);
}

TEST(Log, AReaderThatHasLeftEndsNoProgram) {
  EXPECT_EQ(in_a_child([] {
              int ends[2];
              if (pipe(ends) != 0) _exit(2);
              dup2(ends[1], STDERR_FILENO);
              close(ends[0]);
              signal(SIGPIPE, SIG_DFL);
              error("text");
              sigset_t pending;
              sigpending(&pending);
              if (sigismember(&pending, SIGPIPE) != 0) _exit(3);
              sigset_t mask;
              pthread_sigmask(SIG_BLOCK, nullptr, &mask);
              if (sigismember(&mask, SIGPIPE) != 0) _exit(4);
            }),
            0);
}

}  // namespace
}  // namespace cudasched::log
