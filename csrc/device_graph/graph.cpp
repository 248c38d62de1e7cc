#include <algorithm>
#include <optional>

#include "device_graph/api.hpp"

namespace cudasched::graphs {
namespace {

constexpr int kCaptureToGraph = 12030;
constexpr int kConditional = 12040;
constexpr int kElseAndSwitch = 12080;
constexpr int kDeviceLaunch = 12000;

// The driver reads as many pointers as the kernel has parameters, and each parameter's bytes, without any check. Where
// the driver does not tell their number and sizes (before CUDA 12.4), nothing is checked here.
void check_parameters(const Kernel& kernel) {
  const Api& driver = api();
  if (driver.cuFuncGetParamInfo == nullptr) return;
  const auto bytes_of = [&](std::size_t index) -> std::optional<std::size_t> {
    std::size_t offset = 0;
    std::size_t bytes = 0;
    const CUresult status = driver.cuFuncGetParamInfo(kernel.function, index, &offset, &bytes);
    return status == CUDA_SUCCESS ? std::optional(bytes) : std::nullopt;
  };
  const auto named = [&] {
    const char* name = nullptr;
    const bool known = driver.cuFuncGetName != nullptr && driver.cuFuncGetName(&name, kernel.function) == CUDA_SUCCESS;
    return "the kernel " + (known && name != nullptr ? std::string(name) + " " : std::string());
  };
  const std::size_t given = kernel.parameters.size();
  std::size_t wanted = given;
  while (bytes_of(wanted)) ++wanted;
  if (wanted != given) {
    throw std::invalid_argument(named() + "has " + std::to_string(wanted) + " parameters, and " +
                                std::to_string(given) + " are given");
  }
  for (std::size_t i = 0; i < std::min(given, kernel.parameter_bytes.size()); ++i) {
    const std::optional<std::size_t> bytes = bytes_of(i);
    if (!bytes) break;  // more are given than the kernel has
    if (*bytes == kernel.parameter_bytes[i]) continue;
    throw std::invalid_argument(named() + "has " + std::to_string(*bytes) + " bytes as parameter " + std::to_string(i) +
                                ", and " + std::to_string(kernel.parameter_bytes[i]) + " are given");
  }
}

CUDA_KERNEL_NODE_PARAMS params_of(const Kernel& kernel) {
  check_parameters(kernel);
  CUDA_KERNEL_NODE_PARAMS made{};
  made.func = kernel.function;
  made.gridDimX = kernel.grid[0];
  made.gridDimY = kernel.grid[1];
  made.gridDimZ = kernel.grid[2];
  made.blockDimX = kernel.block[0];
  made.blockDimY = kernel.block[1];
  made.blockDimZ = kernel.block[2];
  made.sharedMemBytes = kernel.shared_bytes;
  made.kernelParams = const_cast<void**>(kernel.parameters.data());
  return made;
}

CUcontext current_context() {
  CUcontext const context = context_of_thread();
  if (context == nullptr)
    throw Error("no context is current to this thread: cuCtxSetCurrent comes first", CUDA_ERROR_INVALID_CONTEXT);
  return context;
}

CUgraph new_graph() {
  CUgraph made = nullptr;
  check(api().cuGraphCreate(&made, 0), "cuGraphCreate");
  return made;
}

Condition make_condition(CUgraph graph, unsigned start_value, unsigned flags) {
  api().need(api().cuGraphConditionalHandleCreate != nullptr, kConditional, "conditional nodes");
  Condition made;
  check(api().cuGraphConditionalHandleCreate(&made.handle, graph, current_context(), start_value, flags),
        "cuGraphConditionalHandleCreate");
  return made;
}

}  // namespace

// ---- nodes

std::size_t Builder::node_count() const {
  std::size_t count = 0;
  check(api().cuGraphGetNodes(graph_, nullptr, &count), "cuGraphGetNodes");
  return count;
}

CUgraphNode Builder::add_kernel(const Kernel& kernel, std::span<const CUgraphNode> after) {
  api().need(api().cuGraphAddKernelNode != nullptr, 12000, "kernel nodes");
  const CUDA_KERNEL_NODE_PARAMS params = params_of(kernel);
  CUgraphNode node = nullptr;
  check(api().cuGraphAddKernelNode(&node, graph_, after.data(), after.size(), &params), "cuGraphAddKernelNode");
  return node;
}

CUgraphNode Builder::add_copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, std::span<const CUgraphNode> after) {
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;  // whichever memory the addresses are of
  copy.srcDevice = from;
  copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.dstDevice = to;
  copy.WidthInBytes = bytes;
  copy.Height = 1;
  copy.Depth = 1;
  CUgraphNode node = nullptr;
  check(api().cuGraphAddMemcpyNode(&node, graph_, after.data(), after.size(), &copy, current_context()),
        "cuGraphAddMemcpyNode");
  return node;
}

CUgraphNode Builder::add_fill(CUdeviceptr to, std::uint8_t value, std::size_t bytes,
                              std::span<const CUgraphNode> after) {
  const CUDA_MEMSET_NODE_PARAMS fill{
      .dst = to, .pitch = bytes, .value = value, .elementSize = 1, .width = bytes, .height = 1};
  CUgraphNode node = nullptr;
  check(api().cuGraphAddMemsetNode(&node, graph_, after.data(), after.size(), &fill, current_context()),
        "cuGraphAddMemsetNode");
  return node;
}

CUgraphNode Builder::add_graph(const Builder& child, std::span<const CUgraphNode> after) {
  CUgraphNode node = nullptr;
  check(api().cuGraphAddChildGraphNode(&node, graph_, after.data(), after.size(), child.handle()),
        "cuGraphAddChildGraphNode");
  return node;
}

CUgraphNode Builder::add_empty(std::span<const CUgraphNode> after) {
  CUgraphNode node = nullptr;
  check(api().cuGraphAddEmptyNode(&node, graph_, after.data(), after.size()), "cuGraphAddEmptyNode");
  return node;
}

Conditional Builder::add_if(Condition condition, bool with_else, std::span<const CUgraphNode> after) {
  return add_conditional(condition, CU_GRAPH_COND_TYPE_IF, with_else ? 2 : 1, after);
}

Conditional Builder::add_while(Condition condition, std::span<const CUgraphNode> after) {
  return add_conditional(condition, CU_GRAPH_COND_TYPE_WHILE, 1, after);
}

Conditional Builder::add_switch(Condition condition, unsigned bodies, std::span<const CUgraphNode> after) {
  return add_conditional(condition, CU_GRAPH_COND_TYPE_SWITCH, bodies, after);
}

Conditional Builder::add_conditional(Condition condition, CUgraphConditionalNodeType type, unsigned bodies,
                                     std::span<const CUgraphNode> after) {
  const Api& driver = api();
  const bool has = driver.cuGraphAddNode != nullptr;
  if (type == CU_GRAPH_COND_TYPE_SWITCH) {
    driver.need(has, kElseAndSwitch, "conditional nodes that choose one of several graphs");
  } else if (bodies == 2) {
    driver.need(has, kElseAndSwitch, "conditional nodes with an else");
  } else {
    driver.need(has, kConditional, "conditional nodes");
  }
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  params.conditional.handle = condition.handle;
  params.conditional.type = type;
  params.conditional.size = bodies;
  params.conditional.ctx = current_context();
  Conditional made;
  check(driver.cuGraphAddNode(&made.node, graph_, after.data(), nullptr, after.size(), &params),
        "cuGraphAddNode of a conditional node (each has a condition of its own, of the same graph)");
  made.bodies.assign(params.conditional.phGraph_out, params.conditional.phGraph_out + bodies);
  return made;
}

// ---- graphs

Graph::Graph() : Graph(new_graph()) {}

Graph& Graph::operator=(Graph&& other) noexcept {
  Graph moved(std::move(other));
  std::swap(static_cast<Builder&>(*this), static_cast<Builder&>(moved));
  return *this;
}

Graph::~Graph() {
  if (handle() != nullptr) api().cuGraphDestroy(handle());
}

Condition Graph::condition() { return make_condition(handle(), 0, 0); }

Condition Graph::condition(unsigned start_value) {
  return make_condition(handle(), start_value, CU_GRAPH_COND_ASSIGN_DEFAULT);
}

// ---- capture

Capture::Capture(CUstream stream, CUstreamCaptureMode mode) : stream_(stream) {
  check(api().cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture");
  open_ = true;
}

Capture::Capture(CUstream stream, const Builder& into, std::span<const CUgraphNode> after, CUstreamCaptureMode mode)
    : stream_(stream), into_(into.handle()) {
  api().need(api().cuStreamBeginCaptureToGraph != nullptr, kCaptureToGraph, "captures into a graph");
  check(api().cuStreamBeginCaptureToGraph(stream, into_, after.data(), nullptr, after.size(), mode),
        "cuStreamBeginCaptureToGraph");
  open_ = true;
}

Capture::~Capture() {
  if (!open_) return;
  CUgraph graph = nullptr;
  if (api().cuStreamEndCapture(stream_, &graph) == CUDA_SUCCESS && graph != nullptr && into_ == nullptr)
    api().cuGraphDestroy(graph);
}

CUgraph Capture::end() {
  if (!open_) throw Error("this capture has ended", CUDA_ERROR_ILLEGAL_STATE);
  open_ = false;
  CUgraph graph = nullptr;
  check(api().cuStreamEndCapture(stream_, &graph), "cuStreamEndCapture");
  return graph;
}

Graph Capture::finish() {
  if (into_ != nullptr) throw Error("a capture into a graph ends by close()", CUDA_ERROR_ILLEGAL_STATE);
  return Graph(end());
}

void Capture::close() {
  CUgraph const graph = end();
  if (into_ == nullptr) api().cuGraphDestroy(graph);
}

// ---- executable graphs

Executable::Executable(const Graph& graph, For where) : exec_(nullptr) {
  const Api& driver = api();
  if (where == For::kDevice) driver.need(true, kDeviceLaunch, "graphs that are launched from the device");
  const unsigned long long flags = where == For::kDevice ? CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH : 0;
  check(driver.cuGraphInstantiateWithFlags(&exec_, graph.handle(), flags), "cuGraphInstantiate");
}

Executable& Executable::operator=(Executable&& other) noexcept {
  Executable moved(std::move(other));
  std::swap(exec_, moved.exec_);
  return *this;
}

Executable::~Executable() {
  if (exec_ != nullptr) api().cuGraphExecDestroy(exec_);
}

void Executable::launch(CUstream stream) const { check(api().cuGraphLaunch(exec_, stream), "cuGraphLaunch"); }

void Executable::upload(CUstream stream) const { check(api().cuGraphUpload(exec_, stream), "cuGraphUpload"); }

Update Executable::update(const Graph& graph) {
  api().need(api().cuGraphExecUpdate != nullptr, 12000, "updates of whole graphs");
  CUgraphExecUpdateResultInfo info{};
  const CUresult status = api().cuGraphExecUpdate(exec_, graph.handle(), &info);
  if (status != CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE) check(status, "cuGraphExecUpdate");
  return {.done = status == CUDA_SUCCESS, .why = info.result, .node = info.errorNode};
}

void Executable::set_kernel(CUgraphNode node, const Kernel& kernel) {
  api().need(api().cuGraphExecKernelNodeSetParams != nullptr, 12000, "changes of kernel nodes");
  const CUDA_KERNEL_NODE_PARAMS params = params_of(kernel);
  check(api().cuGraphExecKernelNodeSetParams(exec_, node, &params), "cuGraphExecKernelNodeSetParams");
}

void Executable::set_enabled(CUgraphNode node, bool enabled) {
  api().need(api().cuGraphNodeSetEnabled != nullptr, 11060, "nodes that can be switched off");
  check(api().cuGraphNodeSetEnabled(exec_, node, enabled ? 1 : 0), "cuGraphNodeSetEnabled");
}

}  // namespace cudasched::graphs
