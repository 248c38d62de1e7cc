#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>

#include "base/error.hpp"
#include "private_directory.hpp"
#include "runtime/predictor_files.hpp"

namespace cudasched::runtime {
namespace {

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    value == nullptr ? unsetenv(name) : setenv(name, value, 1);
  }
  ~Variable() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

class PredictorFiles : public ::testing::Test {
 protected:
  const test::PrivateDirectory private_;
  const std::string directory_ = private_.path();
};

std::vector<std::byte> bytes(std::size_t count, unsigned char value) { return {count, std::byte{value}}; }

TEST_F(PredictorFiles, StateComesBackAsItWasWritten) {
  const std::string path = directory_ + "/deeper/predictor-GPU.state";
  EXPECT_TRUE(read_state(path).empty());
  write_state(path, bytes(1000, 7));
  EXPECT_EQ(read_state(path), bytes(1000, 7));
  write_state(path, bytes(10, 9));
  EXPECT_EQ(read_state(path), bytes(10, 9));
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600U);
}

TEST_F(PredictorFiles, NothingIsLeftBesideTheState) {
  write_state(directory_ + "/a.state", bytes(10, 1));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_), {}), 1);
}

TEST_F(PredictorFiles, WhatCannotBeWrittenSaysWhy) {
  { std::ofstream(directory_ + "/file") << "x"; }
  try {
    write_state(directory_ + "/file/a.state", bytes(10, 1));
    FAIL() << "it was written";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("Not a directory"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(read_state(directory_ + "/file/a.state").empty());
}

TEST_F(PredictorFiles, WhatIsNoFileOfOursIsRefused) {
  EXPECT_THROW(read_state(directory_), StateError);
  EXPECT_THROW(read_state("/dev/zero"), StateError);
}

TEST_F(PredictorFiles, PathFollowsTheSettingThenTheCacheDirectoryThenHome) {
  const Variable home("HOME", "/home/someone");
  Settings settings;
  {
    const Variable cache("XDG_CACHE_HOME", "/cache");
    EXPECT_EQ(state_path(settings, "GPU-1"), "/cache/cudasched/predictor-GPU-1.state");
  }
  {
    const Variable cache("XDG_CACHE_HOME", "not/absolute");
    EXPECT_EQ(state_path(settings, "GPU-1"), "/home/someone/.cache/cudasched/predictor-GPU-1.state");
  }
  settings.cache_directory = "/mine";
  EXPECT_EQ(state_path(settings, "GPU-1"), "/mine/predictor-GPU-1.state");
  settings.cache_directory = "off";
  EXPECT_EQ(state_path(settings, "GPU-1"), "");
  settings.cache_directory.clear();
  const Variable no_cache("XDG_CACHE_HOME", nullptr);
  const Variable no_home("HOME", nullptr);
  EXPECT_EQ(state_path(settings, "GPU-1"), "");
}

TEST_F(PredictorFiles, TreesAreNoneUnlessAModelIsNamed) {
  Settings settings;
  EXPECT_EQ(load_trees(settings, 9, 0), nullptr);
  settings.model_path = "off";
  EXPECT_EQ(load_trees(settings, 9, 0), nullptr);
  settings.model_path = directory_ + "/none.ubj";
  EXPECT_THROW(load_trees(settings, 9, 0), ModelError);
}

TEST_F(PredictorFiles, TreesOfADirectoryAreThoseOfTheArchitecture) {
  Settings settings;
  settings.model_path = directory_;
  EXPECT_EQ(load_trees(settings, 9, 0), nullptr);
  { std::ofstream(directory_ + "/sm_90.json") << "no model"; }
  EXPECT_THROW(load_trees(settings, 9, 0), ModelError);
  EXPECT_EQ(load_trees(settings, 8, 0), nullptr);
}

}  // namespace
}  // namespace cudasched::runtime
