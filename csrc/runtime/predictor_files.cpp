#include "runtime/predictor_files.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "base/error.hpp"
#include "base/log.hpp"
#include "predict/features.hpp"

namespace cudasched::runtime {
namespace {

constexpr std::size_t kMostBytes = std::size_t{16} << 20;
constexpr std::string_view kSimulated = "cudasched simulated GPU";  // the user sets the kernels' durations

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

// A place in the directory kept between runs; "" where nothing is kept.
std::string user_directory(const Settings& settings, const char* place) {
  if (settings.cache_directory == "off") return {};
  if (!settings.cache_directory.empty()) return settings.cache_directory + place;
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  const char* const home = std::getenv("HOME");
  if (cache != nullptr && cache[0] == '/') return std::string(cache) + "/cudasched" + place;
  if (home != nullptr && home[0] == '/') return std::string(home) + "/.cache/cudasched" + place;
  return {};
}

// The models that came with this library, or "".
std::string shipped_models() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<const void*>(&load_trees), &self) == 0 || self.dli_fname == nullptr) return {};
  const std::filesystem::path models = std::filesystem::path(self.dli_fname).parent_path() / "predictor" / "models";
  std::error_code error;
  return std::filesystem::is_directory(models, error) ? models.string() : std::string();
}

std::unique_ptr<const predict::trees::Evaluator> load(const std::string& path, const std::string& architecture,
                                                      const std::string& gpu) {
  auto trees = predict::trees::load_evaluator(path);
  log::info("launches of " + gpu + " are predicted by the trees of " + path);
  const std::string apart = predict::features_apart(trees->feature_names(), trees->features());
  if (!apart.empty()) {
    throw ModelError("the model " + path + " was trained on other features than this cudasched makes of launches: " +
                     apart + "; train it anew (cudasched train)");
  }
  if (!trees->architecture().empty() && trees->architecture() != architecture) {
    throw ModelError("the model " + path + " was trained for " + trees->architecture() + ", and this GPU (" + gpu +
                     ") is " + architecture + "; train one on it (cudasched train)");
  }
  if (!trees->gpu().empty() && trees->gpu() != gpu && gpu.find(kSimulated) == std::string::npos) {
    log::warning("the model " + path + " was trained on another GPU of this architecture, " + trees->gpu() +
                 "; first launches on this one (" + gpu +
                 ") may be predicted badly: cudasched train makes a model for it");
  }
  return trees;
}

}  // namespace

std::unique_ptr<const predict::trees::Evaluator> load_trees(const Settings& settings, int compute_major,
                                                            int compute_minor, const std::string& gpu) {
  if (settings.model_path == "off") return nullptr;
  const std::string architecture = "sm_" + std::to_string(compute_major) + std::to_string(compute_minor);
  std::error_code error;
  std::string searched;
  std::vector<std::string> places{settings.model_path};
  if (settings.model_path.empty()) places = {user_directory(settings, "/models"), shipped_models()};
  for (const std::string& place : places) {
    if (place.empty()) continue;
    const bool is_directory = std::filesystem::is_directory(place, error);
    if (!is_directory && !settings.model_path.empty()) return load(place, architecture, gpu);
    for (const char* ending : {".ubj", ".json"}) {
      const std::string path = place + "/" + architecture + ending;
      if (is_directory && std::filesystem::exists(path, error)) return load(path, architecture, gpu);
    }
    searched += (searched.empty() ? "" : " and ") + place;
  }
  // A library that lies outside its package has no models, which its user knows.
  if (settings.model_path.empty() && shipped_models().empty()) return nullptr;
  log::warning("there is no model for " + gpu + " (" + architecture + ") in " + searched +
               ": first launches are predicted by their geometry alone; cudasched train makes a model");
  return nullptr;
}

std::string state_path(const Settings& settings, const std::string& gpu_uuid) {
  const std::string directory = user_directory(settings, "");
  return directory.empty() ? std::string() : directory + "/predictor-" + gpu_uuid + ".state";
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
