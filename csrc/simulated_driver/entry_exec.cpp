// Entry points: executable graphs and user objects.
#include <cuda.h>

#include <climits>

#include "simulated_driver/capture.hpp"
#include "simulated_driver/driver.hpp"
#include "simulated_driver/node_params.hpp"

namespace cudasched::simulated_driver {
namespace {

std::shared_ptr<Exec> find_exec(CUgraphExec handle) { return find(driver().execs, handle, CUDA_ERROR_INVALID_VALUE); }

CUgraphNode handle_of(const Node* node) { return reinterpret_cast<CUgraphNode>(const_cast<Node*>(node)); }

CUresult instantiate_graph(CUgraphExec* handle, CUgraph graph_handle, unsigned long long flags,
                           InstantiateError& error) {
  constexpr unsigned long long kKnown = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
                                        CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD | CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH |
                                        CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  error.why = CUDA_GRAPH_INSTANTIATE_ERROR;
  if ((flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  return give(handle, [&] {
    const std::shared_ptr<Exec> exec = instantiate(find_graph(graph_handle), flags, error);
    driver().execs.emplace(exec.get(), exec);
    return reinterpret_cast<CUgraphExec>(exec.get());
  });
}

CUresult instantiate_logged(CUgraphExec* exec, CUgraph graph, CUgraphNode* error_node, char* log,
                            std::size_t log_bytes) {
  InstantiateError error;
  const CUresult result = instantiate_graph(exec, graph, 0, error);
  if (error_node != nullptr) *error_node = handle_of(error.node);
  if (log != nullptr && log_bytes > 0) *log = '\0';
  return result;
}

CUresult update_exec(CUgraphExec exec_handle, CUgraph graph_handle, UpdateOutcome& outcome) {
  outcome.result = CU_GRAPH_EXEC_UPDATE_ERROR;
  return with_driver([&](Lock&) {
    outcome = update(*find_exec(exec_handle), find_graph(graph_handle));
    require(outcome.result == CU_GRAPH_EXEC_UPDATE_SUCCESS, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  });
}

// The place in an executable graph of a node of its original graph.
std::size_t find_place(const Exec& exec, CUgraphNode handle) {
  const auto found = exec.structure->by_source.find(find_node(handle).id);
  require(found != exec.structure->by_source.end());
  return found->second;
}

void set_exec_command(Exec& exec, std::size_t place, Command command) {
  const Command& was = (*exec.states)[place].command;
  require(was.index() == command.index());
  require(check_change(was, command, false) == CU_GRAPH_EXEC_UPDATE_SUCCESS);
  if (auto* const kernel = std::get_if<KernelCommand>(&command)) {
    kernel->cooperative = std::get<KernelCommand>(was).cooperative;
  }
  if (auto* const set = std::get_if<SetCommand>(&command)) set->bytes_max = std::get<SetCommand>(was).bytes_max;
  exec.writable()[place].command = std::move(command);
}

// Changes the command of a node of that type.
template <class Params>
CUresult set_exec_node(CUgraphExec exec_handle, CUgraphNode node, CUgraphNodeType type, const Params* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    current_context();
    const std::shared_ptr<Exec> exec = find_exec(exec_handle);
    const std::size_t place = find_place(*exec, node);
    require(exec->structure->nodes[place].type == type);
    set_exec_command(*exec, place, read_params(*params));
  });
}

CUresult set_exec_child(CUgraphExec exec_handle, CUgraphNode node, CUgraph child_handle) {
  return with_driver([&](Lock&) {
    const std::shared_ptr<Exec> exec = find_exec(exec_handle);
    const std::size_t place = find_place(*exec, node);
    require(exec->structure->nodes[place].type == CU_GRAPH_NODE_TYPE_GRAPH);
    require(update(*exec, find_graph(child_handle), place).result == CU_GRAPH_EXEC_UPDATE_SUCCESS);
  });
}

// For kernels, fills and copies.
template <class F>
CUresult with_switch(CUgraphExec exec_handle, CUgraphNode node, F call) {
  return with_driver([&](Lock&) {
    const std::shared_ptr<Exec> exec = find_exec(exec_handle);
    const std::size_t place = find_place(*exec, node);
    const CUgraphNodeType type = exec->structure->nodes[place].type;
    require(type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_MEMSET ||
            type == CU_GRAPH_NODE_TYPE_MEMCPY);
    call(*exec, place);
  });
}

// call(exec, stream) with a launch's or an upload's graph and stream.
template <class F>
CUresult with_launch(CUgraphExec exec_handle, CUstream stream_handle, F call) {
  return with_driver([&](Lock& lock) {
    const std::shared_ptr<Exec> exec = find_exec(exec_handle);
    const std::shared_ptr<Stream> stream = find_stream(stream_handle);
    refuse_implicit(*stream);
    refuse_capturing(*stream);
    call(lock, exec, stream);
  });
}

UserObject& find_object(CUuserObject handle, unsigned count) {
  require(count != 0 && count <= INT_MAX);
  return *find(driver().user_objects, handle, CUDA_ERROR_INVALID_VALUE);
}

}  // namespace
}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

// ---- instantiation

CUresult cuGraphInstantiate(CUgraphExec* exec, CUgraph graph, CUgraphNode* error_node, char* log, size_t log_bytes) {
  return instantiate_logged(exec, graph, error_node, log, log_bytes);
}

CUresult cuGraphInstantiate_v2(CUgraphExec* exec, CUgraph graph, CUgraphNode* error_node, char* log, size_t log_bytes) {
  return instantiate_logged(exec, graph, error_node, log, log_bytes);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  InstantiateError error;
  return instantiate_graph(exec, graph, flags, error);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  InstantiateError error;
  CUresult result = instantiate_graph(exec, graph, params->flags, error);
  if (result == CUDA_SUCCESS && (params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0) {
    result = cuGraphUpload(*exec, params->hUploadStream);
  }
  params->hErrNode_out = handle_of(error.node);
  params->result_out = error.why;
  return result;
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_GRAPH_INSTANTIATE_PARAMS with = *params;
  with.hUploadStream = per_thread(params->hUploadStream);
  const CUresult result = cuGraphInstantiateWithParams(exec, graph, &with);
  params->hErrNode_out = with.hErrNode_out;
  params->result_out = with.result_out;
  return result;
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  return with_driver([&](Lock&) { require(driver().execs.erase(reinterpret_cast<Exec*>(handle)) != 0); });
}

CUresult cuGraphExecGetFlags(CUgraphExec handle, cuuint64_t* flags) {
  return give(flags, [&] { return find_exec(handle)->flags; });
}

// ---- launches

CUresult cuGraphLaunch(CUgraphExec exec_handle, CUstream stream_handle) {
  return with_launch(exec_handle, stream_handle,
                     [](Lock& lock, const auto& exec, const auto& stream) { submit_exec(lock, stream, exec); });
}

CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) { return cuGraphLaunch(exec, per_thread(stream)); }

CUresult cuGraphUpload(CUgraphExec exec_handle, CUstream stream_handle) {
  return with_launch(exec_handle, stream_handle,
                     [](Lock& lock, const auto&, const auto& stream) { submit_command(lock, stream, {}); });
}

CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream) { return cuGraphUpload(exec, per_thread(stream)); }

// ---- updates

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
  if (info == nullptr) return CUDA_ERROR_INVALID_VALUE;
  UpdateOutcome outcome;
  const CUresult result = update_exec(exec, graph, outcome);
  *info = {};
  info->result = outcome.result;
  info->errorNode = handle_of(outcome.node);
  info->errorFromNode = handle_of(outcome.from);
  return result;
}

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode* error_node, CUgraphExecUpdateResult* said) {
  UpdateOutcome outcome;
  const CUresult result = update_exec(exec, graph, outcome);
  if (error_node != nullptr) *error_node = handle_of(outcome.node);
  if (said != nullptr) *said = outcome.result;
  return result;
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* params) {
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_KERNEL, params);
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1* params) {
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_KERNEL, params);
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D* params, CUcontext) {
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_MEMCPY, params);
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* params,
                                        CUcontext) {
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_MEMSET, params);
}

CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS* params) {
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_HOST, params);
}

CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_EVENT_RECORD, &event);
}

CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_WAIT_EVENT, &event);
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
  return set_exec_child(exec, node, child);
}

CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (params->type == CU_GRAPH_NODE_TYPE_GRAPH) return set_exec_child(exec, node, params->graph.graph);
  return set_exec_node(exec, node, params->type, params);
}

CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled) {
  return with_switch(exec, node, [&](Exec& of, std::size_t place) { of.writable()[place].enabled = enabled != 0; });
}

CUresult cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned* enabled) {
  if (enabled == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_switch(exec, node, [&](Exec& of, std::size_t place) { *enabled = (*of.states)[place].enabled ? 1 : 0; });
}

// ---- user objects

CUresult cuUserObjectCreate(CUuserObject* object, void* data, CUhostFn destroy, unsigned references, unsigned flags) {
  if (destroy == nullptr || references == 0 || references > INT_MAX || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return give(object, [&] {
    auto made = std::make_unique<UserObject>(UserObject{data, destroy, references});
    const auto handle = reinterpret_cast<CUuserObject>(made.get());
    driver().user_objects.emplace(made.get(), std::move(made));
    return handle;
  });
}

CUresult cuUserObjectRetain(CUuserObject handle, unsigned count) {
  return with_driver([&](Lock&) { find_object(handle, count).references += count; });
}

CUresult cuUserObjectRelease(CUuserObject handle, unsigned count) {
  return with_driver([&](Lock&) { release_references(find_object(handle, count), count); });
}

CUresult cuGraphRetainUserObject(CUgraph handle, CUuserObject object_handle, unsigned count, unsigned flags) {
  if ((flags & ~static_cast<unsigned>(CU_GRAPH_USER_OBJECT_MOVE)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    find_graph(handle).holds.add(find_object(object_handle, count), count, flags == CU_GRAPH_USER_OBJECT_MOVE);
  });
}

CUresult cuGraphReleaseUserObject(CUgraph handle, CUuserObject object_handle, unsigned count) {
  return with_driver(
      [&](Lock&) { require(find_graph(handle).holds.remove(find_object(object_handle, count), count)); });
}

}  // extern "C"
#pragma GCC visibility pop
