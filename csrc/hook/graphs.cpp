#include "hook/graphs.hpp"

#include <cuda.h>

#include <cstddef>
#include <optional>
#include <span>

#include "driver/barrier.hpp"
#include "driver/driver.hpp"
#include "driver/node_priorities.hpp"
#include "driver/registry.hpp"
#include "hook/engine_calls.hpp"
#include "queue/router.hpp"
#include "runtime/engine.hpp"

namespace cudasched::hook {
namespace {

using driver::table;

void note(CUgraphExec exec, CUgraph graph, unsigned long long flags) noexcept {
  runtime::engine().note_graph(exec, graph, flags);
  driver::ExecFacts facts;
  if (!driver::registry().find(exec, facts)) driver::registry().may_hold_memory();
}

// ---- the priority of kernel nodes (docs/policies.md)

// The graph that this thread captured last on a stream with a class of its own. PyTorch instantiates it at once.
struct Captured {
  CUgraph graph = nullptr;
  Class stream_class = Class::kNormal;
};
constinit thread_local Captured captured;

Class class_of(CUgraph graph) noexcept {
  if (graph != nullptr && graph == captured.graph) return captured.stream_class;
  return runtime::classify(nullptr, runtime::this_thread());
}

constexpr unsigned long long kUseNodePriority = CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
constexpr int kDefaultPriority = 0;

// The priority that the kernel nodes of `graph` are to have for its caller's class. None for graphs that the device
// launches. The flag for node priorities says nothing of a caller's wishes: PyTorch passes it for every graph.
std::optional<int> wanted_priority(CUgraph graph, unsigned long long flags) noexcept {
  if (!runtime::hot().scheduling.load(std::memory_order_relaxed) || !runtime::engine().node_priority() ||
      (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) != 0) {
    return {};
  }
  const Class caller = class_of(graph);
  if (caller == Class::kNormal) return {};
  int lowest = 0;
  int highest = 0;
  if (table().cuCtxGetStreamPriorityRange(&lowest, &highest) != CUDA_SUCCESS || lowest == highest) return {};
  return caller == Class::kLatency ? highest : lowest;
}

// instantiate(flags) makes *exec, by the user's call or another one. False: nothing was made.
template <typename Instantiate>
bool instantiate_prioritised(CUgraphExec* exec, CUgraph graph, unsigned long long flags,
                             Instantiate&& instantiate) noexcept {
  const std::optional<int> priority = exec == nullptr ? std::nullopt : wanted_priority(graph, flags);
  if (!priority) return false;
  telemetry::Shard& count = runtime::hot().counters.shard(runtime::this_thread().index);
  // By the caller's own flag nodes run at their priorities: the default, or the caller's choice, which stays.
  if (*priority == kDefaultPriority && (flags & kUseNodePriority) != 0) {
    if (instantiate(flags) != CUDA_SUCCESS) return false;
    count.prioritised_graphs.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  driver::NodePriorities nodes(graph);
  if (!nodes.complete() || nodes.chosen()) return false;
  if (nodes.set(*priority) && instantiate(flags | kUseNodePriority) == CUDA_SUCCESS) {
    // An update must find the priority, or the driver refuses that update.
    if (runtime::engine().note_priority(*exec, {*priority, (flags & kUseNodePriority) == 0})) {
      count.prioritised_graphs.fetch_add(1, std::memory_order_relaxed);
      return true;
    }
    table().cuGraphExecDestroy(*exec);
  }
  count.unprioritised_graphs.fetch_add(1, std::memory_order_relaxed);
  return false;
}

// update() takes the nodes of `graph` over into `exec`. Their priorities may not differ from those given to `exec`.
// Where they cannot be made equal, the driver refuses the update.
template <typename Update>
CUresult update_prioritised(CUgraphExec exec, CUgraph graph, Update&& update) noexcept {
  const std::optional<runtime::GivenPriority> given = runtime::engine().graphs().priority(exec);
  if (!given) return update();
  driver::NodePriorities nodes(graph);
  // Who asked for node priorities, and has chosen some by now, gets the driver's answer.
  if (!given->flag_is_ours && nodes.chosen()) return update();
  nodes.set(given->priority);
  return update();
}

// ---- entry points

template <typename Plain>
CUresult instantiate_with_log(CUgraphExec* exec, CUgraph graph, CUgraphNode* error_node, char* log,
                              std::size_t log_bytes, Plain* plain) noexcept {
  CUresult status = CUDA_SUCCESS;
  if (instantiate_prioritised(exec, graph, 0, [&](unsigned long long flags) {
        return table().cuGraphInstantiateWithFlags(exec, graph, flags);
      })) {
    if (error_node != nullptr) *error_node = nullptr;
    if (log != nullptr && log_bytes > 0) *log = '\0';
  } else {
    status = plain(exec, graph, error_node, log, log_bytes);
  }
  if (status == CUDA_SUCCESS && exec != nullptr) note(*exec, graph, 0);
  return status;
}

CUresult instantiate_v1(CUgraphExec* exec, CUgraph graph, CUgraphNode* error_node, char* log,
                        std::size_t log_bytes) noexcept {
  return instantiate_with_log(exec, graph, error_node, log, log_bytes, table().cuGraphInstantiate_v1);
}

CUresult instantiate_v2(CUgraphExec* exec, CUgraph graph, CUgraphNode* error_node, char* log,
                        std::size_t log_bytes) noexcept {
  return instantiate_with_log(exec, graph, error_node, log, log_bytes, table().cuGraphInstantiate_v2);
}

CUresult instantiate(CUgraphExec* exec, CUgraph graph, unsigned long long flags) noexcept {
  const auto call = [&](unsigned long long with) { return table().cuGraphInstantiateWithFlags(exec, graph, with); };
  const CUresult status = instantiate_prioritised(exec, graph, flags, call) ? CUDA_SUCCESS : call(flags);
  if (status == CUDA_SUCCESS && exec != nullptr) note(*exec, graph, flags);
  return status;
}

template <bool kPerThread>
CUresult instantiate_with_parameters(CUgraphExec* exec, CUgraph graph,
                                     CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) noexcept {
  auto* const real = table().cuGraphInstantiateWithParams.get<kPerThread>();
  const auto call = [&](unsigned long long flags) {
    CUDA_GRAPH_INSTANTIATE_PARAMS with = *parameters;
    with.flags = flags;
    const CUresult status = real(exec, graph, &with);
    if (status == CUDA_SUCCESS) {
      with.flags = parameters->flags;
      *parameters = with;
    }
    return status;
  };
  const bool prioritised = parameters != nullptr && instantiate_prioritised(exec, graph, parameters->flags, call);
  const CUresult status = prioritised ? CUDA_SUCCESS : real(exec, graph, parameters);
  if (status == CUDA_SUCCESS && exec != nullptr) note(*exec, graph, parameters == nullptr ? 0 : parameters->flags);
  return status;
}

// A change of an executable graph, whose queued launches must run unchanged. Where all of them go in slices, the driver
// is asked at once, and slices get the change in the ring, behind these launches. Else the launches are submitted
// first.
class Changing final : public runtime::Slices::UpdateQueue {
 public:
  explicit Changing(CUgraphExec exec) noexcept : exec_(exec) {
    back_off();
    if (queue::router().has_queued(exec)) {
      follows_ = queue::router().queue_of(exec) != nullptr && runtime::engine().slices().follow(exec);
      if (!follows_) queue::router().drain_changed(this_caller(), exec);
    }
    was_launched_ = driver::registry().changed(exec);
  }

  // tell(behind) reports the driver's change; not called where the driver has refused.
  template <typename Tell>
  CUresult done(CUresult status, Tell&& tell) noexcept {
    if (status == CUDA_SUCCESS) {
      tell(follows_ ? this : nullptr);
      // After an accepted change the driver has no reason to refuse a launch: the next one may be deferred, too.
      if (was_launched_) driver::registry().launched(exec_);
    } else if (follows_) {
      runtime::engine().slices().followed(exec_);
    }
    return status;
  }

  bool push(CUgraphExec exec, CUcontext context, std::span<const std::byte> change) noexcept override {
    queue::Queue* const queue = queue::router().queue_of(exec);
    return queue != nullptr && queue->push_change(this_caller(), exec, context, change);
  }
  void drain() noexcept override { queue::router().drain_changed(this_caller(), exec_); }

 private:
  // As a launch does: dozens of changes may come before one, and each takes the interpreter's lock.
  void back_off() const noexcept {
    if (!runtime::hot().host_backoff.requested()) [[likely]]
      return;
    queue::Site site = find_site(nullptr, nullptr);
    site.queue = queue::router().queue_of(exec_);
    runtime::back_off(site);
  }

  CUgraphExec exec_;
  bool follows_ = false;
  bool was_launched_ = false;
};

template <typename Update>
CUresult updated(CUgraphExec exec, CUgraph graph, Update&& update) noexcept {
  Changing changing(exec);
  return changing.done(
      driver::crossed([&] { return update_prioritised(exec, graph, update); }),
      [&](runtime::Slices::UpdateQueue* behind) { runtime::engine().note_update(exec, graph, behind); });
}

CUresult update_v1(CUgraphExec exec, CUgraph graph, CUgraphNode* error_node, CUgraphExecUpdateResult* result) noexcept {
  return updated(exec, graph, [&] { return table().cuGraphExecUpdate_v1(exec, graph, error_node, result); });
}

CUresult update(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* result) noexcept {
  return updated(exec, graph, [&] { return table().cuGraphExecUpdate(exec, graph, result); });
}

// ---- one node of an executable graph: accepted changes are made to our clone of the graph, too, and to its slices

// call() asks the driver; set(node) makes the program's change of `node` to a node of ours. `context` is the program's;
// null: none.
template <typename Call, typename Set>
CUresult node_changed(CUgraphExec exec, CUgraphNode node, CUcontext context, Call&& call, Set&& set) noexcept {
  Changing changing(exec);
  return changing.done(driver::crossed(call), [&](runtime::Slices::UpdateQueue* behind) {
    runtime::engine().slices().node_changed(exec, node, context, set, behind);
  });
}

template <typename Call>
CUresult child_changed(CUgraphExec exec, CUgraphNode node, CUgraph child, Call&& call) noexcept {
  Changing changing(exec);
  return changing.done(driver::crossed([&] { return update_prioritised(exec, child, call); }),
                       [&](runtime::Slices::UpdateQueue* behind) {
                         runtime::engine().slices().child_changed(exec, node, child, behind);
                       });
}

CUresult kernel_set(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* parameters) noexcept {
  return node_changed(
      exec, node, parameters == nullptr ? nullptr : parameters->ctx,
      [&] { return table().cuGraphExecKernelNodeSetParams(exec, node, parameters); },
      [&](CUgraphNode ours) { return table().cuGraphKernelNodeSetParams(ours, parameters); });
}

CUresult kernel_set_v1(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1* parameters) noexcept {
  const auto set = [&](CUgraphNode ours) {
    const CUDA_KERNEL_NODE_PARAMS_v1& given = *parameters;
    const CUDA_KERNEL_NODE_PARAMS newer{given.func,         given.gridDimX,  given.gridDimY,  given.gridDimZ,
                                        given.blockDimX,    given.blockDimY, given.blockDimZ, given.sharedMemBytes,
                                        given.kernelParams, given.extra,     nullptr,         nullptr};
    return table().cuGraphKernelNodeSetParams(ours, &newer);
  };
  return node_changed(
      exec, node, nullptr, [&] { return table().cuGraphExecKernelNodeSetParams_v1(exec, node, parameters); }, set);
}

CUresult copy_set(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D* parameters, CUcontext context) noexcept {
  return node_changed(
      exec, node, context, [&] { return table().cuGraphExecMemcpyNodeSetParams(exec, node, parameters, context); },
      [&](CUgraphNode ours) { return table().cuGraphMemcpyNodeSetParams(ours, parameters); });
}

CUresult fill_set(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* parameters,
                  CUcontext context) noexcept {
  return node_changed(
      exec, node, context, [&] { return table().cuGraphExecMemsetNodeSetParams(exec, node, parameters, context); },
      [&](CUgraphNode ours) { return table().cuGraphMemsetNodeSetParams(ours, parameters); });
}

CUresult host_set(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS* parameters) noexcept {
  return node_changed(
      exec, node, nullptr, [&] { return table().cuGraphExecHostNodeSetParams(exec, node, parameters); },
      [&](CUgraphNode ours) { return table().cuGraphHostNodeSetParams(ours, parameters); });
}

CUresult set_enabled(CUgraphExec exec, CUgraphNode node, unsigned enabled) noexcept {
  Changing changing(exec);
  return changing.done(table().cuGraphNodeSetEnabled(exec, node, enabled), [&](runtime::Slices::UpdateQueue* behind) {
    runtime::engine().slices().node_enabled(exec, node, enabled != 0, behind);
  });
}

CUresult update_child(CUgraphExec exec, CUgraphNode node, CUgraph child) noexcept {
  return child_changed(exec, node, child,
                       [&] { return table().cuGraphExecChildGraphNodeSetParams(exec, node, child); });
}

CUresult update_node(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams* parameters) noexcept {
  const auto call = [&] { return table().cuGraphExecNodeSetParams(exec, node, parameters); };
  const CUgraphNodeType type = parameters == nullptr ? CU_GRAPH_NODE_TYPE_EMPTY : parameters->type;
  if (type == CU_GRAPH_NODE_TYPE_GRAPH) return child_changed(exec, node, parameters->graph.graph, call);
  const CUcontext context = type == CU_GRAPH_NODE_TYPE_KERNEL   ? parameters->kernel.ctx
                            : type == CU_GRAPH_NODE_TYPE_MEMCPY ? parameters->memcpy.copyCtx
                            : type == CU_GRAPH_NODE_TYPE_MEMSET ? parameters->memset.ctx
                                                                : nullptr;
  return node_changed(exec, node, context, call,
                      [&](CUgraphNode ours) { return table().cuGraphNodeSetParams(ours, parameters); });
}

CUresult retain_object(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) noexcept {
  driver::registry().may_hold_objects();
  return table().cuGraphRetainUserObject(graph, object, count, flags);
}

// The flag is no business of a user who did not give it.
CUresult get_flags(CUgraphExec exec, cuuint64_t* flags) noexcept {
  const CUresult status = table().cuGraphExecGetFlags(exec, flags);
  if (status != CUDA_SUCCESS) return status;
  const std::optional<runtime::GivenPriority> given = runtime::engine().graphs().priority(exec);
  if (given && given->flag_is_ours) *flags &= ~cuuint64_t{kUseNodePriority};
  return status;
}

CUresult destroy(CUgraphExec exec) noexcept {
  runtime::engine().forget_graph(exec);
  return table().cuGraphExecDestroy(exec);
}

}  // namespace

void note_captured(CUstream stream, CUgraph graph) noexcept {
  Class value = Class::kNormal;
  const bool has_class = runtime::hot().streams.find(reinterpret_cast<std::uintptr_t>(stream), value);
  captured = {has_class ? graph : nullptr, value};
}

void order_behind_slices(const queue::Call& call) noexcept {
  // CUDA runs launches of one executable graph in the order of the calls, over all streams.
  queue::router().drain(call.site.caller, {.scope = queue::Scope::kGraph, .exec = call.graph()},
                        queue::Waiter::For::kLaunch);
  if (!runtime::Slices::may_be_sliced(call.graph()) || driver::is_capturing(call.stream)) return;
  runtime::engine().slices().before_direct(call.graph(), call.stream);
}

void launched_whole(const queue::Call& call) noexcept {
  if (call.site.captured || driver::registry().slices(call.graph()) == nullptr) return;
  if (runtime::is_captured(call.stream)) return;
  runtime::engine().slices().after_direct(call.graph(), call.stream);
}

std::span<const TakenOver> graph_functions() noexcept {
  static const TakenOver points[] = {
      {"cuGraphInstantiate_v2", &instantiate_v2},
      {"cuGraphInstantiate", &instantiate_v1},
      {"cuGraphInstantiateWithFlags", &instantiate},
      {"cuGraphInstantiateWithParams", &instantiate_with_parameters<false>, &instantiate_with_parameters<true>},
      {"cuGraphExecUpdate_v2", &update},
      {"cuGraphExecUpdate", &update_v1},
      {"cuGraphExecKernelNodeSetParams", &kernel_set_v1},
      {"cuGraphExecKernelNodeSetParams_v2", &kernel_set},
      {"cuGraphExecMemcpyNodeSetParams", &copy_set},
      {"cuGraphExecMemsetNodeSetParams", &fill_set},
      {"cuGraphExecHostNodeSetParams", &host_set},
      {"cuGraphNodeSetEnabled", &set_enabled},
      {"cuGraphExecChildGraphNodeSetParams", &update_child},
      {"cuGraphExecNodeSetParams", &update_node},
      {"cuGraphRetainUserObject", &retain_object},
      {"cuGraphExecGetFlags", &get_flags},
      {"cuGraphExecDestroy", &destroy},
  };
  return points;
}

}  // namespace cudasched::hook
