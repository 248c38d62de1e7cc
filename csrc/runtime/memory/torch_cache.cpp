#include "runtime/memory/torch_cache.hpp"

#include <dirent.h>
#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>

#include "base/log.hpp"

namespace cudasched::runtime {
namespace {

constexpr std::string_view kLibrary = "/libc10_cuda.so";

// .../torch/lib, of the PyTorch that is loaded; empty: none is.
std::string library_directory() {
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* into) {
        const std::string_view name = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        if (!name.ends_with(kLibrary)) return 0;
        try {
          *static_cast<std::string*>(into) = name.substr(0, name.size() - kLibrary.size());
        } catch (const std::exception&) {
        }
        return 1;
      },
      &found);
  return found;
}

// "2.11.0+cu130", from .../torch/version.py; empty where that says nothing.
std::string version_of(const std::string& directory) {
  std::ifstream file(directory + "/../version.py");
  constexpr std::string_view kBegin = "__version__ = '";
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(kBegin)) continue;
    const std::size_t end = line.find('\'', kBegin.size());
    return end == std::string::npos ? "" : line.substr(kBegin.size(), end - kBegin.size());
  }
  return "";
}

std::string cache_directory() {
  const char* const given = std::getenv("XDG_CACHE_HOME");
  if (given != nullptr && *given == '/') return given;
  const char* const home = std::getenv("HOME");
  return home != nullptr && *home == '/' ? std::string(home) + "/.cache" : "";
}

// As python/cudasched/torch/_extension.py names it; the newest, where several versions of cudasched have built one.
std::string extension_for(std::string version) {
  for (char& c : version) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '+') c = '_';
  }
  const std::string cache = cache_directory();
  if (cache.empty() || version.empty()) return "";
  const std::string wanted = "torch-" + version + "-";
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir((cache + "/cudasched").c_str()), &closedir);
  std::string found;
  timespec newest{};
  while (directory != nullptr) {
    const dirent* const entry = readdir(directory.get());
    if (entry == nullptr) break;
    if (!std::string_view(entry->d_name).starts_with(wanted)) continue;
    const std::string path = cache + "/cudasched/" + entry->d_name + "/libcudasched_torch.so";
    struct stat status {};
    if (lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != geteuid() ||
        (status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
      continue;
    }
    const timespec& made = status.st_mtim;
    if (!found.empty() &&
        (made.tv_sec < newest.tv_sec || (made.tv_sec == newest.tv_sec && made.tv_nsec < newest.tv_nsec))) {
      continue;
    }
    found = path;
    newest = made;
  }
  return found;
}

}  // namespace

bool torch_is_loaded() noexcept {
  return dl_iterate_phdr(
             [](dl_phdr_info* info, std::size_t, void*) {
               return info->dlpi_name != nullptr && std::string_view(info->dlpi_name).ends_with(kLibrary) ? 1 : 0;
             },
             nullptr) != 0;
}

cudasched_release_cache find_torch_cache() noexcept {
  try {
    const std::string directory = library_directory();
    const std::string path = directory.empty() ? "" : extension_for(version_of(directory));
    void* const library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return nullptr;
    const auto release = reinterpret_cast<cudasched_release_cache>(dlsym(library, "cudasched_torch_release_cache"));
    if (release != nullptr) log::info("PyTorch's cache is given back by " + path);
    return release;
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace cudasched::runtime
