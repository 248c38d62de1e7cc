// CUDA graphs of a program's own: captured or built node by node, replayed, updated, with conditional nodes and
// launches from the device. Also memory pools for graphs that are planned ahead, and peers and collectives between
// GPUs. Thin: each class owns one handle of the driver's and states in words why the driver refused.
//
//   graphs::Capture capture(stream);
//   launch_my_kernels(stream);
//   graphs::Executable replay(capture.finish());
//   for (...) replay.launch(stream);
//
// C++20 and the cuda.h of CUDA 12.4 or later; link cudasched::graphs. The driver is looked for at run time
// (libcuda.so.1, which is cudasched's shim under `cudasched run`), never linked. A context must be current to the
// calling thread; a handle is destroyed in the context that created it. Objects are used by one thread at a time.
// Errors are thrown: Error for a call that the driver refused, UnsupportedError for a feature that this driver or
// machine lacks. The latter's text has the version that brings the feature. Destructors ignore the driver's status.
//
// Under cudasched, best-effort graphs are cut into slices beside latency clients. A graph with conditional nodes, and
// one that can be launched from the device, goes whole: a request may wait for all of it (docs/graphs.md).
#ifndef CUDASCHED_GRAPHS_HPP_
#define CUDASCHED_GRAPHS_HPP_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if CUDA_VERSION < 12040
#error "cudasched/graphs.hpp needs the cuda.h of CUDA 12.4 or later; the program may run with an older driver"
#endif

namespace cudasched::graphs {

// A call of the driver failed; status() is CUDA_SUCCESS where the driver did not refuse.
class Error : public std::runtime_error {
 public:
  Error(const std::string& text, CUresult status) : std::runtime_error(text), status_(status) {}
  CUresult status() const noexcept { return status_; }

 private:
  CUresult status_;
};

// This driver is too old for the feature, or a library is missing.
class UnsupportedError : public Error {
 public:
  explicit UnsupportedError(const std::string& text) : Error(text, CUDA_ERROR_NOT_SUPPORTED) {}
};

// Of the driver that is loaded, such as 13000.
int driver_version();

// ---- graphs ---------------------------------------------------------------------------------------------------------

// A launch of a kernel, as a node of a graph. The driver copies `parameters` when the node is made or changed. Fewer
// than the kernel has throw std::invalid_argument. So do stated sizes other than the kernel's, if the driver tells
// these (CUDA 12.4).
struct Kernel {
  CUfunction function = nullptr;
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  std::vector<void*> parameters{};             // a pointer to each
  std::vector<std::size_t> parameter_bytes{};  // the size of each; empty: not told
};

// The value that controls one conditional node. Kernels of the node's graph set this value (cudaGraphSetConditional).
struct Condition {
  CUgraphConditionalHandle handle = 0;
};

// A conditional node, and the graphs that it may run. The node owns these graphs; fill them with Body or Capture.
struct Conditional {
  CUgraphNode node = nullptr;
  std::vector<CUgraph> bodies{};
};

// Adds nodes to a graph or to a body of a conditional node. Does not own the graph.
class Builder {
 public:
  explicit Builder(CUgraph graph) : graph_(graph) {}

  CUgraph handle() const noexcept { return graph_; }
  std::size_t node_count() const;

  // Each node runs after those of `after`, which are of the same graph.
  CUgraphNode add_kernel(const Kernel& kernel, std::span<const CUgraphNode> after = {});
  // Device or pinned memory, of any GPU that the other reaches.
  CUgraphNode add_copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, std::span<const CUgraphNode> after = {});
  CUgraphNode add_fill(CUdeviceptr to, std::uint8_t value, std::size_t bytes, std::span<const CUgraphNode> after = {});
  CUgraphNode add_graph(const Builder& child, std::span<const CUgraphNode> after = {});
  CUgraphNode add_empty(std::span<const CUgraphNode> after = {});

  // Conditional nodes (CUDA 12.4; else, and switch, 12.8). Their conditions are made of the outermost graph.
  // Runs bodies[0] where the condition is not 0, else bodies[1] if there is one.
  Conditional add_if(Condition condition, bool with_else = false, std::span<const CUgraphNode> after = {});
  // Runs bodies[0] as long as the condition is not 0, checked before each run.
  Conditional add_while(Condition condition, std::span<const CUgraphNode> after = {});
  // Runs bodies[condition], none where there are fewer.
  Conditional add_switch(Condition condition, unsigned bodies, std::span<const CUgraphNode> after = {});

 private:
  Conditional add_conditional(Condition condition, CUgraphConditionalNodeType type, unsigned bodies,
                              std::span<const CUgraphNode> after);

  CUgraph graph_;
};

// Owns a graph.
class Graph : public Builder {
 public:
  Graph();
  explicit Graph(CUgraph owned) : Builder(owned) {}
  Graph(Graph&& other) noexcept : Builder(std::exchange(static_cast<Builder&>(other), Builder(nullptr))) {}
  Graph& operator=(Graph&& other) noexcept;
  ~Graph();

  // For one conditional node here or in a body inside. With a start value each launch begins with that value; without
  // one the value persists between launches.
  Condition condition();
  Condition condition(unsigned start_value);
};

// Turns the launches on a stream into a graph, or adds them to one, until finish(). A capture that is not finished, as
// when an exception leaves its scope, ends without a trace.
class Capture {
 public:
  explicit Capture(CUstream stream, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  // Into a graph or the body of a conditional node, after the nodes named (CUDA 12.3).
  Capture(CUstream stream, const Builder& into, std::span<const CUgraphNode> after = {},
          CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture();

  // The graph. Throws Error where a call that may not be captured has ended the capture. A capture into a graph does
  // not transfer that graph's ownership: use close().
  Graph finish();
  void close();

 private:
  CUgraph end();

  CUstream stream_;
  CUgraph into_ = nullptr;
  bool open_ = false;
};

enum class For {
  kHost,    // launched by launch()
  kDevice,  // also by kernels of other graphs (CUDA 12.0); upload it before its first launch there
};

// The result of update().
struct Update {
  bool done = false;
  CUgraphExecUpdateResult why = CU_GRAPH_EXEC_UPDATE_SUCCESS;
  CUgraphNode node = nullptr;  // of the new graph, that does not fit
};

// A graph that can be launched. Instantiation fixes the nodes and parameters; update() and set_kernel() change the
// parameters.
class Executable {
 public:
  explicit Executable(const Graph& graph, For where = For::kHost);
  Executable(Executable&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  Executable& operator=(Executable&& other) noexcept;
  ~Executable();

  CUgraphExec handle() const noexcept { return exec_; }
  // The handle that a kernel passes to cudaGraphLaunch to launch this graph from the device.
  std::uint64_t device_handle() const noexcept { return reinterpret_cast<std::uint64_t>(exec_); }

  void launch(CUstream stream) const;
  // Moves the data of a launch to the device ahead of the launch.
  void upload(CUstream stream) const;

  // Takes over the parameters of a graph with the same nodes and edges. Where that graph does not fit, nothing has
  // changed: instantiate anew.
  Update update(const Graph& graph);
  // One kernel's function, sizes and parameters. The node belongs to the source graph of this executable.
  void set_kernel(CUgraphNode node, const Kernel& kernel);
  // A kernel, copy or fill that is off does nothing.
  void set_enabled(CUgraphNode node, bool enabled);

 private:
  CUgraphExec exec_;
};

// ---- memory ---------------------------------------------------------------------------------------------------------

// Memory that captured work uses, from the step of the first use to that of the last. Steps are the program's own count
// of work that runs one after another, over all graphs that share a pool. Two uses whose steps do not overlap may have
// the same memory.
struct Use {
  std::size_t bytes = 0;
  std::uint32_t first_step = 0;
  std::uint32_t last_step = 0;
};

struct Plan {
  std::vector<std::size_t> offsets{};  // for each use
  std::size_t bytes = 0;               // of the pool
};

// Places each use so that no two that overlap in time overlap in memory. The largest comes first, each at the lowest
// offset that is free for all of its steps. Pure. Throws std::invalid_argument: last_step before first_step, an
// alignment that is no power of two, or sizes whose sum overflows.
Plan plan_memory(std::span<const Use> uses, std::size_t alignment = 256);

// One allocation with an aligned place for each use. Addresses do not change, as graphs require. The pool must outlive
// the graphs that use its memory.
class StaticPool {
 public:
  explicit StaticPool(std::span<const Use> uses, std::size_t alignment = 256);
  StaticPool(const StaticPool&) = delete;
  StaticPool& operator=(const StaticPool&) = delete;
  ~StaticPool();

  CUdeviceptr address(std::size_t use) const { return base_ + plan_.offsets.at(use); }
  std::size_t bytes() const noexcept { return plan_.bytes; }

 private:
  Plan plan_;
  CUdeviceptr memory_ = 0;
  CUdeviceptr base_ = 0;         // of the plan, in that memory
  CUcontext context_ = nullptr;  // of the memory
};

// ---- code that launches from the device -----------------------------------------------------------------------------

// Where libcudadevrt.a is: CUDA_HOME, CUDA_PATH, /usr/local/cuda, the toolkit whose nvcc is on the PATH, or beside a
// loaded libcudart or libnvrtc. Empty: not found.
std::string find_device_runtime();

// A module of relocatable images (nvcc -rdc=true -cubin, NVRTC with --relocatable-device-code=true), linked by the
// driver with CUDA's device runtime. Kernels that launch kernels or graphs, or set conditions, need that runtime.
class LinkedModule {
 public:
  // device_runtime: libcudadevrt.a; empty: find_device_runtime(). Throws Error with the linker's log.
  explicit LinkedModule(std::span<const std::string> images, const std::string& device_runtime = {});
  LinkedModule(LinkedModule&& other) noexcept
      : module_(std::exchange(other.module_, nullptr)), context_(other.context_) {}
  LinkedModule& operator=(const LinkedModule&) = delete;
  ~LinkedModule();

  CUmodule handle() const noexcept { return module_; }
  CUfunction function(const char* name) const;

 private:
  CUmodule module_ = nullptr;
  CUcontext context_ = nullptr;  // in which it is loaded
};

// ---- several GPUs ---------------------------------------------------------------------------------------------------

// Lets kernels and copies in one context use memory of the other; a no-op where access is enabled already. Throws
// UnsupportedError: the GPUs cannot reach each other.
void enable_peer_access(CUcontext from, CUcontext to);

// One communicator of NCCL for each of several GPUs of this process. libnccl.so.2 is found at run time: the one already
// loaded, or the loader's search finds one. Sums can be captured: one capture a GPU, open on all streams at once.
class Collectives {
 public:
  // Throws UnsupportedError: there is no NCCL.
  explicit Collectives(std::span<const int> devices);
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;
  ~Collectives();

  // Of `count` floats: data[i], on the i-th GPU, becomes the sum of all. One stream a GPU. Throws Error: a context is
  // gone, and no sum was begun; or NCCL refuses.
  void sum(std::span<const CUdeviceptr> data, std::size_t count, std::span<const CUstream> streams);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cudasched::graphs

#endif
