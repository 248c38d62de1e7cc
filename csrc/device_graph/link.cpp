#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <filesystem>

#include "device_graph/api.hpp"

namespace cudasched::graphs {
namespace {

#if defined(__x86_64__)
constexpr char kTarget[] = "x86_64-linux";
#else
constexpr char kTarget[] = "sbsa-linux";
#endif

constexpr const char* kRuntime = "libcudadevrt.a";

// The directory of a loaded library; empty: not loaded.
std::filesystem::path directory_of(const char* library, const char* symbol) {
  void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return {};
  Dl_info info{};
  void* const address = dlsym(handle, symbol);
  const bool found = address != nullptr && dladdr(address, &info) != 0 && info.dli_fname != nullptr;
  dlclose(handle);
  return found ? std::filesystem::path(info.dli_fname).parent_path() : std::filesystem::path();
}

// Where the toolkit is whose nvcc is on the PATH; empty: none is.
std::filesystem::path toolkit_of_path() {
  const char* const path = std::getenv("PATH");
  std::string left = path == nullptr ? "" : path;
  while (!left.empty()) {
    const std::size_t end = left.find(':');
    const std::filesystem::path compiler = std::filesystem::path(left.substr(0, end)) / "nvcc";
    left.erase(0, end == std::string::npos ? end : end + 1);
    std::error_code error;
    if (!std::filesystem::exists(compiler, error)) continue;
    const std::filesystem::path real = std::filesystem::canonical(compiler, error);
    if (!error) return real.parent_path().parent_path();
  }
  return {};
}

struct Linker {
  CUlinkState state = nullptr;
  ~Linker() {
    if (state != nullptr) api().cuLinkDestroy(state);
  }
};

}  // namespace

std::string find_device_runtime() {
  std::vector<std::filesystem::path> places;
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const char* const home = std::getenv(name)) {
      places.emplace_back(std::filesystem::path(home) / "lib64");
      places.emplace_back(std::filesystem::path(home) / "lib");
    }
  }
  places.emplace_back("/usr/local/cuda/lib64");
  if (const std::filesystem::path toolkit = toolkit_of_path(); !toolkit.empty()) {
    places.push_back(toolkit / "lib64");
    places.push_back(toolkit / "targets" / kTarget / "lib");
  }
  for (const char* library : {"libcudart.so.13", "libcudart.so.12"})
    places.push_back(directory_of(library, "cudaMalloc"));
  for (const char* library : {"libnvrtc.so.13", "libnvrtc.so.12"})
    places.push_back(directory_of(library, "nvrtcVersion"));
  for (const auto& place : places) {
    std::error_code error;
    if (!place.empty() && std::filesystem::exists(place / kRuntime, error)) return (place / kRuntime).string();
  }
  return {};
}

LinkedModule::LinkedModule(std::span<const std::string> images, const std::string& device_runtime) {
  const Api& driver = api();
  driver.need(driver.cuLinkCreate != nullptr && driver.cuLinkAddFile != nullptr, 11040,
              "modules that are linked at run time");
  std::array<char, 4096> log{};
  std::array<CUjit_option, 2> options{CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  std::array<void*, 2> values{log.data(), reinterpret_cast<void*>(log.size())};
  const auto linked = [&](CUresult status, const char* call) {
    try {
      check(status, call);
    } catch (const Error& error) {
      throw Error(std::string(error.what()) + (log[0] == '\0' ? "" : std::string("\n") + log.data()), status);
    }
  };
  Linker linker;
  const CUresult created =
      driver.cuLinkCreate(static_cast<unsigned>(options.size()), options.data(), values.data(), &linker.state);
  driver.need(created != CUDA_ERROR_NOT_SUPPORTED, 11040, "modules that are linked at run time");
  linked(created, "cuLinkCreate");
  const std::string runtime = device_runtime.empty() ? find_device_runtime() : device_runtime;
  if (runtime.empty()) {
    throw UnsupportedError(std::string(kRuntime) + " is not found: it comes with CUDA's toolkit; set CUDA_HOME");
  }
  for (const std::string& image : images) {
    // ELF is machine code, else PTX, which ends with a NUL that is counted.
    const bool is_code = image.compare(0, 4,
                                       "\x7f"
                                       "ELF") == 0;
    linked(driver.cuLinkAddData(linker.state, is_code ? CU_JIT_INPUT_CUBIN : CU_JIT_INPUT_PTX,
                                const_cast<char*>(image.c_str()), image.size() + (is_code ? 0 : 1), "image", 0, nullptr,
                                nullptr),
           "cuLinkAddData");
  }
  linked(driver.cuLinkAddFile(linker.state, CU_JIT_INPUT_LIBRARY, runtime.c_str(), 0, nullptr, nullptr),
         "cuLinkAddFile");
  void* code = nullptr;
  std::size_t bytes = 0;
  linked(driver.cuLinkComplete(linker.state, &code, &bytes), "cuLinkComplete");
  context_ = context_of_thread();
  check(driver.cuModuleLoadData(&module_, code), "cuModuleLoadData");
}

LinkedModule::~LinkedModule() {
  if (module_ == nullptr) return;
  if (const Current current(context_); current.ok()) api().cuModuleUnload(module_);  // else unloaded with its context
}

CUfunction LinkedModule::function(const char* name) const {
  CUfunction found = nullptr;
  check(api().cuModuleGetFunction(&found, module_, name), "cuModuleGetFunction");
  return found;
}

}  // namespace cudasched::graphs
