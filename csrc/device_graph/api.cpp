#include "device_graph/api.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>

namespace cudasched::graphs {
namespace {

constexpr int kLeastVersion = 11040;

std::string version_text(int version) {
  return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The first release of the driver that has a version of CUDA.
const char* release_of(int version) {
  struct Release {
    int version;
    const char* release;
  };
  constexpr std::array<Release, 8> kReleases{{{11040, "470"},
                                              {12000, "525"},
                                              {12020, "535"},
                                              {12030, "545"},
                                              {12040, "550"},
                                              {12060, "560"},
                                              {12080, "570"},
                                              {13000, "580"}}};
  const auto found =
      std::find_if(kReleases.begin(), kReleases.end(), [&](const Release& of) { return of.version >= version; });
  return found == kReleases.end() ? "a later one" : found->release;
}

Api load() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) throw UnsupportedError("there is no NVIDIA driver here: libcuda.so.1 is not found");
  Api made;
#define TEXT_OF(name) #name
#define CALL(name) made.name = reinterpret_cast<decltype(::name)*>(dlsym(library, TEXT_OF(name)));
#include "device_graph/calls.inc"
#undef CALL
  if (made.cuDriverGetVersion != nullptr) made.cuDriverGetVersion(&made.version);
  const bool has_graphs = made.cuGetErrorName != nullptr && made.cuStreamBeginCapture != nullptr &&
                          made.cuStreamIsCapturing != nullptr && made.cuThreadExchangeStreamCaptureMode != nullptr &&
                          made.cuGraphInstantiateWithFlags != nullptr && made.cuGraphLaunch != nullptr &&
                          made.cuGraphExecDestroy != nullptr && made.cuGraphDestroy != nullptr;
  made.need(has_graphs, kLeastVersion, "graphs");
  return made;
}

}  // namespace

void Api::need(bool has, int needed_version, const char* what) const {
  if (has && version >= needed_version) return;
  throw UnsupportedError(std::string(what) + " need an NVIDIA driver for " + version_text(needed_version) +
                         " (release " + release_of(needed_version) + ") or later; this one is for " +
                         version_text(version) + (version >= needed_version ? " and lacks them all the same" : ""));
}

const Api& api() {
  static const Api loaded = load();
  return loaded;
}

int driver_version() { return api().version; }

void check(CUresult status, const char* call) {
  if (status == CUDA_SUCCESS) return;
  const char* name = nullptr;
  api().cuGetErrorName(status, &name);
  throw Error(std::string(call) + ": " + (name == nullptr ? "error" : name) + " (" + std::to_string(status) + ")",
              status);
}

CUcontext context_of_thread() {
  CUcontext context = nullptr;
  check(api().cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  return context;
}

}  // namespace cudasched::graphs
