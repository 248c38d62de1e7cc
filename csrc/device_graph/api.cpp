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
  const auto find = [library](auto*& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
  };
  Api made;
  decltype(cuDriverGetVersion)* get_version = nullptr;
  find(get_version, "cuDriverGetVersion");
  if (get_version != nullptr) get_version(&made.version);
  find(made.get_error_name, "cuGetErrorName");
  find(made.context_current, "cuCtxGetCurrent");
  find(made.context_device, "cuCtxGetDevice");
  find(made.context_push, "cuCtxPushCurrent_v2");
  find(made.context_pop, "cuCtxPopCurrent_v2");
  find(made.enable_peer, "cuCtxEnablePeerAccess");
  find(made.can_access_peer, "cuDeviceCanAccessPeer");
  find(made.primary_retain, "cuDevicePrimaryCtxRetain");
  find(made.primary_release, "cuDevicePrimaryCtxRelease_v2");
  find(made.begin_capture, "cuStreamBeginCapture_v2");
  find(made.begin_capture_to_graph, "cuStreamBeginCaptureToGraph");
  find(made.is_capturing, "cuStreamIsCapturing");
  find(made.end_capture, "cuStreamEndCapture");
  find(made.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(made.graph_create, "cuGraphCreate");
  find(made.graph_destroy, "cuGraphDestroy");
  find(made.graph_nodes, "cuGraphGetNodes");
  find(made.add_kernel, "cuGraphAddKernelNode_v2");
  find(made.add_copy, "cuGraphAddMemcpyNode");
  find(made.add_fill, "cuGraphAddMemsetNode");
  find(made.add_child, "cuGraphAddChildGraphNode");
  find(made.add_empty, "cuGraphAddEmptyNode");
  find(made.add_node, "cuGraphAddNode_v2");
  find(made.create_condition, "cuGraphConditionalHandleCreate");
  find(made.instantiate, "cuGraphInstantiateWithFlags");
  find(made.exec_destroy, "cuGraphExecDestroy");
  find(made.launch, "cuGraphLaunch");
  find(made.upload, "cuGraphUpload");
  find(made.update, "cuGraphExecUpdate_v2");
  find(made.set_kernel, "cuGraphExecKernelNodeSetParams_v2");
  find(made.set_enabled, "cuGraphNodeSetEnabled");
  find(made.allocate, "cuMemAlloc_v2");
  find(made.free, "cuMemFree_v2");
  find(made.load_module, "cuModuleLoadData");
  find(made.unload_module, "cuModuleUnload");
  find(made.get_function, "cuModuleGetFunction");
  find(made.link_create, "cuLinkCreate_v2");
  find(made.link_add_data, "cuLinkAddData_v2");
  find(made.link_add_file, "cuLinkAddFile_v2");
  find(made.link_complete, "cuLinkComplete");
  find(made.link_destroy, "cuLinkDestroy");
  find(made.function_parameter, "cuFuncGetParamInfo");
  find(made.function_name, "cuFuncGetName");
  const bool has_graphs = made.get_error_name != nullptr && made.begin_capture != nullptr &&
                          made.is_capturing != nullptr && made.exchange_capture_mode != nullptr &&
                          made.instantiate != nullptr && made.launch != nullptr && made.exec_destroy != nullptr &&
                          made.graph_destroy != nullptr;
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
  api().get_error_name(status, &name);
  throw Error(std::string(call) + ": " + (name == nullptr ? "error" : name) + " (" + std::to_string(status) + ")",
              status);
}

CUcontext context_of_thread() {
  CUcontext context = nullptr;
  check(api().context_current(&context), "cuCtxGetCurrent");
  return context;
}

}  // namespace cudasched::graphs
