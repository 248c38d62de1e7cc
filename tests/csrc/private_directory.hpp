// A directory of a test's own, removed at its end by the process that made it: not by a forked child.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

namespace cudasched::test {

class PrivateDirectory {
 public:
  PrivateDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "cudasched-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no directory " + name + " could be made");
    path_ = name;
  }
  ~PrivateDirectory() {
    std::error_code ignored;
    if (getpid() == owner_) std::filesystem::remove_all(path_, ignored);
  }
  PrivateDirectory(const PrivateDirectory&) = delete;
  PrivateDirectory& operator=(const PrivateDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const pid_t owner_ = getpid();
};

}  // namespace cudasched::test
