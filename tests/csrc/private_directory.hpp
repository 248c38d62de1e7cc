// A directory of a test's own, removed at its end by the process that made it: not by a forked child. In memory, those
// of a program that the test starts are within its own, and go with it however that program ends.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

namespace cudasched::test {

class PrivateDirectory {
 public:
  // Where temporary files are.
  PrivateDirectory() : PrivateDirectory(std::filesystem::temp_directory_path()) {}

  // In memory, as the tables of programs are, where it has room: a disk waits for what is written again and again. No
  // place for libraries and programs: it may forbid to run what is in it.
  static PrivateDirectory in_memory() {
    constexpr std::uintmax_t kRoom = std::uintmax_t{48} << 20;
    constexpr const char* kOfTheTest = "CUDASCHED_TEST_DIRECTORY";
    if (const char* const outer = getenv(kOfTheTest); outer != nullptr && access(outer, W_OK) == 0) {
      return PrivateDirectory(outer);
    }
    const std::filesystem::path memory = "/dev/shm";
    std::error_code missing;
    const auto room = std::filesystem::space(memory, missing);
    const bool usable = !missing && room.available >= kRoom && access(memory.c_str(), W_OK) == 0;
    return PrivateDirectory(usable ? memory : std::filesystem::temp_directory_path(), kOfTheTest);
  }

  ~PrivateDirectory() {
    std::error_code ignored;
    if (getpid() == owner_) std::filesystem::remove_all(path_, ignored);
  }
  PrivateDirectory(const PrivateDirectory&) = delete;
  PrivateDirectory& operator=(const PrivateDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  // The environment says under `variable` where it is.
  explicit PrivateDirectory(const std::filesystem::path& parent, const char* variable = nullptr) {
    std::string name = (parent / "cudasched-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no directory " + name + " could be made");
    path_ = name;
    if (variable != nullptr) setenv(variable, path_.c_str(), 1);
  }

  std::string path_;
  const pid_t owner_ = getpid();
};

}  // namespace cudasched::test
