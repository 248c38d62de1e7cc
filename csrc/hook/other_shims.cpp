#include "hook/other_shims.hpp"

#include <link.h>

#include <algorithm>
#include <array>

namespace cudasched::hook {
namespace {

struct OtherShim {
  std::string_view library;
  std::string_view product;
  bool schedules;
};

constexpr std::array kOtherShims{
    OtherShim{"libhalcuda.so", "XSched", true},  OtherShim{"libshimcuda.so", "XSched", true},
    OtherShim{"libnvshare.so", "nvshare", true}, OtherShim{"libgemhook.so.1", "KubeShare's Gemini", true},
    OtherShim{"libvgpu.so", "HAMi-core", false}, OtherShim{"libvgpu-control.so", "vgpu-manager", false},
};

std::string_view file_name(std::string_view path) { return path.substr(path.rfind('/') + 1); }

const OtherShim* known(std::string_view path) {
  const auto found = std::find_if(kOtherShims.begin(), kOtherShims.end(),
                                  [&](const OtherShim& each) { return each.library == file_name(path); });
  return found == kOtherShims.end() ? nullptr : &*found;
}

}  // namespace

std::string rival_among(std::span<const std::string> libraries) {
  for (const std::string& path : libraries) {
    const OtherShim* const shim = known(path);
    if (shim == nullptr || !shim->schedules) continue;
    return std::string(shim->product) + " (" + path +
           ") schedules this program's launches already, so cudasched does not: run it without one of the two";
  }
  return {};
}

std::string limits_among(std::span<const std::string> libraries) {
  std::string names;
  for (const std::string& path : libraries) {
    const OtherShim* const shim = known(path);
    if (shim == nullptr || shim->schedules) continue;
    names += (names.empty() ? "" : ", ") + path + " (" + std::string(shim->product) + ")";
  }
  return names;
}

std::vector<std::string> loaded_libraries() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* library, std::size_t, void* found) {
        static_cast<std::vector<std::string>*>(found)->emplace_back(library->dlpi_name);
        return 0;
      },
      &paths);
  return paths;
}

}  // namespace cudasched::hook
