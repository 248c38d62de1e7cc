#include "runtime/predictor_files.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/error.hpp"
#include "predict/features.hpp"

namespace cudasched::runtime {
namespace {

constexpr std::size_t kMostBytes = std::size_t{16} << 20;

class File {
 public:
  explicit File(int descriptor) noexcept : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const noexcept { return descriptor_; }

 private:
  int descriptor_;
};

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw StateError("the predictor's state " + path + " cannot be " + what + ": " + std::strerror(errno));
}

// The models that came with this library, or "".
std::string shipped_models() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<const void*>(&load_trees), &self) == 0 || self.dli_fname == nullptr) return {};
  const std::filesystem::path models = std::filesystem::path(self.dli_fname).parent_path() / "predictor" / "models";
  std::error_code error;
  return std::filesystem::is_directory(models, error) ? models.string() : std::string();
}

std::unique_ptr<const predict::trees::Evaluator> load(const std::string& path) {
  auto trees = predict::trees::load_evaluator(path);
  if (trees->features() != predict::kFeatureCount) {
    throw ModelError("the model " + path + " takes " + std::to_string(trees->features()) +
                     " features where launches have " + std::to_string(predict::kFeatureCount) +
                     "; train it anew (python -m training.train)");
  }
  return trees;
}

}  // namespace

std::unique_ptr<const predict::trees::Evaluator> load_trees(const Settings& settings, int compute_major,
                                                            int compute_minor) {
  const std::string path = settings.model_path.empty() ? shipped_models() : settings.model_path;
  if (path.empty() || path == "off") return nullptr;
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return load(path);
  const std::string stem = path + "/sm_" + std::to_string(compute_major) + std::to_string(compute_minor);
  for (const char* ending : {".ubj", ".json"}) {
    if (std::filesystem::exists(stem + ending, error)) return load(stem + ending);
  }
  return nullptr;
}

std::string state_path(const Settings& settings, const std::string& gpu_uuid) {
  std::string directory = settings.cache_directory;
  if (directory == "off") return {};
  if (directory.empty()) {
    const char* const cache = std::getenv("XDG_CACHE_HOME");
    const char* const home = std::getenv("HOME");
    if (cache != nullptr && cache[0] == '/') {
      directory = std::string(cache) + "/cudasched";
    } else if (home != nullptr && home[0] == '/') {
      directory = std::string(home) + "/.cache/cudasched";
    } else {
      return {};
    }
  }
  return directory + "/predictor-" + gpu_uuid + ".state";
}

std::vector<std::byte> read_state(const std::string& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return {};
    fail(path, "opened");
  }
  struct stat status {};
  if (fstat(file.get(), &status) != 0) fail(path, "examined");
  if (!S_ISREG(status.st_mode) || static_cast<std::size_t>(status.st_size) > kMostBytes) {
    throw StateError("the predictor's state " + path + " is no file of ours; remove it");
  }
  std::vector<std::byte> state(static_cast<std::size_t>(status.st_size));
  std::size_t done = 0;
  while (done < state.size()) {
    const ssize_t bytes = read(file.get(), state.data() + done, state.size() - done);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) fail(path, "read");
    if (bytes == 0) break;
    done += static_cast<std::size_t>(bytes);
  }
  state.resize(done);
  return state;
}

void write_state(const std::string& path, std::span<const std::byte> state) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  const std::string temporary = path + "." + std::to_string(getpid());
  {
    const File file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (file.get() < 0) fail(temporary, "written");
    std::size_t done = 0;
    while (done < state.size()) {
      const ssize_t bytes = write(file.get(), state.data() + done, state.size() - done);
      if (bytes < 0 && errno == EINTR) continue;
      if (bytes <= 0) {
        const int why = errno;
        unlink(temporary.c_str());
        errno = why;
        fail(temporary, "written");
      }
      done += static_cast<std::size_t>(bytes);
    }
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    const int why = errno;
    unlink(temporary.c_str());
    errno = why;
    fail(path, "replaced");
  }
}

}  // namespace cudasched::runtime
