// cudasched_install (include/cudasched/engine.h): puts the shim that is beside libcudasched.so in front of the driver,
// for programs that link this library, and for Python. Looks only at loaded libraries, and makes no driver call. Called
// on any thread, by the program.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/loader.h"
#include "base/switch.h"
#include "cudasched/engine.h"
#include "hook/find_driver.h"
#include "hook/other_shims.hpp"
#include "runtime/guarded.hpp"

namespace cudasched::hook {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kEngineName = "libcudasched.so";
constexpr std::string_view kDriverName = "libcuda.so";

// libcuda.so, libcuda.so.1, libcuda.so.580.65.06
bool names_a_driver(const fs::path& path) {
  const std::string name = path.filename();
  return name.starts_with(kDriverName) &&
         name.find_first_not_of(".0123456789", kDriverName.size()) == std::string::npos;
}

bool same_file(const fs::path& one, const fs::path& other) {
  std::error_code unreadable;
  return fs::equivalent(one, other, unreadable);
}

// The version of the cudasched whose shim this loaded library is; null: no shim.
const char* shim_version(const fs::path& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  void* const ask = cudasched_loader_find(library, "cudasched_shim_version");
  dlclose(library);  // the library stays loaded: this was one more reference
  return ask == nullptr ? nullptr : reinterpret_cast<const char* (*)()>(ask)();
}

fs::path own_path() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<const void*>(&names_a_driver), &self) == 0 || self.dli_fname == nullptr) {
    throw HookError("the loader does not say where libcudasched.so lies, so the driver shim beside it cannot be found");
  }
  return fs::canonical(self.dli_fname);
}

[[noreturn]] void refuse_second(const fs::path& there, const fs::path& ours) {
  throw HookError("two installations of cudasched meet in this process: " + there.string() + " is loaded, and " +
                  ours.string() + " would be the second; run the program with the one that it links");
}

void load(const fs::path& library) {
  if (dlopen(library.c_str(), RTLD_GLOBAL | RTLD_NOW) != nullptr) return;
  throw HookError(std::string("the driver shim cannot be loaded: ") + dlerror() + "; reinstall cudasched");
}

void install() {
  if (cudasched_switch(std::getenv("CUDASCHED_OFF")) == 1) return;
  const fs::path engine = own_path();
  const fs::path shim = engine.parent_path() / "hook/libcuda.so.1";
  const fs::path stub = engine.parent_path() / "hook/libcuda.so";

  std::vector<fs::path> drivers;
  for (const fs::path path : loaded_libraries()) {
    if (path.filename() == kEngineName && !same_file(path, engine)) refuse_second(path, engine);
    if (!names_a_driver(path) || same_file(path, stub)) continue;
    if (!same_file(path, shim) && shim_version(path) != nullptr) refuse_second(path, shim);
    drivers.push_back(path);
  }
  // The real driver, too, is loaded by the time that the shim has passed a call on.
  const bool first =
      std::any_of(drivers.begin(), drivers.end(), [&](const auto& path) { return same_file(path, shim); });
  if (!first && !drivers.empty()) {
    throw HookError(
        "CUDA is loaded already (" + drivers.front().string() +
        "), so its calls cannot be seen: create the scheduler before the first CUDA call (in Python: import "
        "cudasched before torch and whatever else loads CUDA); a program that links libcuda.so itself "
        "links " +
        shim.string() + " (cudasched::driver in CMake) in its place, or is started with `cudasched run`");
  }
  if (!first) {
    std::array<char, 4096> driver{};
    std::array<char, 1024> why{};
    if (cudasched_hook_find_driver(driver.data(), driver.size(), why.data(), why.size()) != 0) {
      throw HookError(why.data());
    }
  }
  // The stub's only need is libcuda.so.1, which by then is the shim.
  load(shim);
  load(stub);
}

}  // namespace
}  // namespace cudasched::hook

extern "C" int cudasched_install(void) { return cudasched::runtime::guarded(&cudasched::hook::install); }
