#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

#include "base/error.hpp"
#include "base/log.hpp"

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

}  // namespace
}  // namespace cudasched::log
