#include <dlfcn.h>

#include <chrono>
#include <exception>
#include <future>
#include <thread>

#include "device_graph/api.hpp"

namespace cudasched::graphs {
namespace {

CUdevice device_of(CUcontext context) {
  const Current current(context);
  current.need();
  CUdevice device = 0;
  check(api().cuCtxGetDevice(&device), "cuCtxGetDevice");
  return device;
}

// Within which NCCL destroys communicators that no graph holds.
constexpr std::chrono::milliseconds kGraphsAreGone{200};

// NCCL's types, as in nccl.h.
using Communicator = void*;
constexpr int kFloat = 7;
constexpr int kSum = 0;

struct Nccl {
  int (*init_all)(Communicator*, int, const int*) = nullptr;
  int (*destroy)(Communicator) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*all_reduce)(const void*, void*, std::size_t, int, int, Communicator, CUstream) = nullptr;
  const char* (*error_text)(int) = nullptr;

  void check(int status, const char* call) const {
    if (status != 0) throw Error(std::string(call) + ": " + error_text(status), CUDA_SUCCESS);
  }
};

Nccl load_nccl() {
  void* const library = dlopen("libnccl.so.2", RTLD_NOW);
  if (library == nullptr) {
    throw UnsupportedError(
        "there is no NCCL here: libnccl.so.2 is not found (pip install nvidia-nccl-cu13, or PyTorch, has it)");
  }
  Nccl made;
  const auto find = [library](auto*& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) throw UnsupportedError(std::string("this libnccl.so.2 has no ") + name);
  };
  find(made.init_all, "ncclCommInitAll");
  find(made.destroy, "ncclCommDestroy");
  find(made.group_start, "ncclGroupStart");
  find(made.group_end, "ncclGroupEnd");
  find(made.all_reduce, "ncclAllReduce");
  find(made.error_text, "ncclGetErrorString");
  return made;
}

}  // namespace

void enable_peer_access(CUcontext from, CUcontext to) {
  const Api& driver = api();
  driver.need(driver.cuCtxEnablePeerAccess != nullptr && driver.cuDeviceCanAccessPeer != nullptr, 11040, "peers");
  const CUdevice of_from = device_of(from);
  const CUdevice of_to = device_of(to);
  int can = 0;
  const CUresult asked = driver.cuDeviceCanAccessPeer(&can, of_from, of_to);
  driver.need(asked != CUDA_ERROR_NOT_SUPPORTED, 11040, "peers");  // by the shim, where a driver lacks it
  check(asked, "cuDeviceCanAccessPeer");
  if (can == 0) {
    throw UnsupportedError("GPU " + std::to_string(of_from) + " cannot use memory of GPU " + std::to_string(of_to) +
                           ": no NVLink and no PCIe path between the two");
  }
  const Current current(from);
  current.need();
  const CUresult status = driver.cuCtxEnablePeerAccess(to, 0);
  if (status != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) check(status, "cuCtxEnablePeerAccess");
}

struct Collectives::State {
  Nccl nccl;
  std::vector<Communicator> communicators;
  std::vector<CUcontext> contexts;
  std::vector<CUdevice> devices;
  bool captured = false;  // a graph may have a sum of these

  ~State() {
    for (Communicator const communicator : communicators) {
      if (communicator != nullptr) nccl.destroy(communicator);
    }
    for (std::size_t i = 0; i < contexts.size(); ++i) api().cuDevicePrimaryCtxRelease(devices[i]);
  }
};

Collectives::Collectives(std::span<const int> devices) : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.nccl = load_nccl();
  for (const int device : devices) {
    CUcontext context = nullptr;
    check(api().cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    state.contexts.push_back(context);
    state.devices.push_back(device);
  }
  state.communicators.resize(devices.size());
  state.nccl.check(state.nccl.init_all(state.communicators.data(), static_cast<int>(devices.size()), devices.data()),
                   "ncclCommInitAll");
}

// NCCL destroys a communicator when the last graph with one of its sums is gone, and waits until then. So a thread of
// its own destroys the communicator, because this thread may be about to destroy those graphs. Without such graphs, all
// is done at the return.
Collectives::~Collectives() {
  if (!state_->captured) return;
  State* const state = state_.release();
  try {
    std::packaged_task<void()> destroy([state] {
      CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;  // the program may capture by then
      api().cuThreadExchangeStreamCaptureMode(&mode);
      delete state;
    });
    const std::future<void> done = destroy.get_future();
    std::thread(std::move(destroy)).detach();
    done.wait_for(kGraphsAreGone);
  } catch (const std::exception&) {  // no thread: the communicators stay until the process ends
  }
}

void Collectives::sum(std::span<const CUdeviceptr> data, std::size_t count, std::span<const CUstream> streams) {
  State& state = *state_;
  if (data.size() != state.communicators.size() || streams.size() != data.size()) {
    throw std::invalid_argument("a sum over " + std::to_string(state.communicators.size()) +
                                " GPUs needs as many arrays and streams");
  }
  // Before the group: of a group that is left half way, NCCL runs the part given, which waits for the rest.
  for (CUcontext const context : state.contexts) Current(context).need();
  state.nccl.check(state.nccl.group_start(), "ncclGroupStart");
  int status = 0;
  CUresult pushed = CUDA_SUCCESS;
  for (std::size_t i = 0; i < data.size() && status == 0 && pushed == CUDA_SUCCESS; ++i) {
    const Current current(state.contexts[i]);
    pushed = current.status();
    if (!current.ok()) continue;
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    state.captured = state.captured || api().cuStreamIsCapturing(streams[i], &capture) != CUDA_SUCCESS ||
                     capture != CU_STREAM_CAPTURE_STATUS_NONE;
    void* const memory = reinterpret_cast<void*>(data[i]);
    status = state.nccl.all_reduce(memory, memory, count, kFloat, kSum, state.communicators[i], streams[i]);
  }
  const int ended = state.nccl.group_end();  // in every case: the thread's later calls would join the group
  check(pushed, "cuCtxPushCurrent");
  state.nccl.check(status, "ncclAllReduce");
  state.nccl.check(ended, "ncclGroupEnd");
}

}  // namespace cudasched::graphs
