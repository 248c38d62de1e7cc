#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
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
  EXPECT_EQ(load_trees(settings, 9, 0, "NVIDIA H200"), nullptr);
  settings.model_path = "off";
  EXPECT_EQ(load_trees(settings, 9, 0, "NVIDIA H200"), nullptr);
  settings.model_path = directory_ + "/none.ubj";
  EXPECT_THROW(load_trees(settings, 9, 0, "NVIDIA H200"), ModelError);
}

TEST_F(PredictorFiles, TreesOfADirectoryAreThoseOfTheArchitecture) {
  Settings settings;
  settings.model_path = directory_;
  EXPECT_EQ(load_trees(settings, 9, 0, "NVIDIA H200"), nullptr);
  { std::ofstream(directory_ + "/sm_90.json") << "no model"; }
  EXPECT_THROW(load_trees(settings, 9, 0, "NVIDIA H200"), ModelError);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(load_trees(settings, 8, 0, "NVIDIA A100"), nullptr);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("there is no model for NVIDIA A100 (sm_80)"), std::string::npos) << said;
  EXPECT_NE(said.find("cudasched train"), std::string::npos) << said;
}

// The trees of the package, which say that they are of an H200.
TEST_F(PredictorFiles, AModelIsHeldAgainstItsArchitectureAndItsGpu) {
  Settings settings;
  settings.model_path = CUDASCHED_SHIPPED_MODEL;
  const auto said_by = [&](const std::string& gpu) {
    ::testing::internal::CaptureStderr();
    EXPECT_NE(load_trees(settings, 9, 0, gpu), nullptr);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(said_by("NVIDIA H200"), "");
  EXPECT_EQ(said_by("cudasched simulated GPU"), "");
  EXPECT_NE(said_by("NVIDIA H100 PCIe").find("trained on another GPU of this architecture, NVIDIA H200"),
            std::string::npos);
  try {
    load_trees(settings, 8, 0, "NVIDIA A100");
    FAIL() << "it was loaded";
  } catch (const ModelError& error) {
    EXPECT_NE(std::string(error.what()).find("trained for sm_90"), std::string::npos) << error.what();
  }
}

TEST_F(PredictorFiles, AModelOfOtherFeaturesIsRefusedByTheirNames) {
  std::ifstream shipped(CUDASCHED_SHIPPED_MODEL, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(shipped), {}};
  const std::size_t at = bytes.find("log_blocks");
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at, 10, "log_clocks");
  Settings settings;
  settings.model_path = directory_ + "/other.ubj";
  { std::ofstream(settings.model_path, std::ios::binary) << bytes; }
  try {
    load_trees(settings, 9, 0, "NVIDIA H200");
    FAIL() << "it was loaded";
  } catch (const ModelError& error) {
    EXPECT_NE(std::string(error.what()).find("it lacks log_blocks; it has log_clocks"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace cudasched::runtime
