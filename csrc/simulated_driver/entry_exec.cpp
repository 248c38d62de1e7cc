// Entry points: executable graphs and user objects.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <climits>

#include "simulated_driver/capture.hpp"
#include "simulated_driver/driver.hpp"
#include "simulated_driver/node_params.hpp"

namespace cudasched::simulated_driver {
namespace {

CUresult find_exec(CUgraphExec handle, std::shared_ptr<Exec>& exec) {
  const auto found = driver().execs.find(reinterpret_cast<Exec*>(handle));
  if (found == driver().execs.end()) return CUDA_ERROR_INVALID_VALUE;
  exec = found->second;
  return CUDA_SUCCESS;
}

CUgraphNode handle_of(const Node* node) { return reinterpret_cast<CUgraphNode>(const_cast<Node*>(node)); }

CUresult instantiate_graph(CUgraphExec* handle, CUgraph graph_handle, unsigned long long flags,
                           InstantiateError& error) {
  constexpr unsigned long long kKnown = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
                                        CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD | CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH |
                                        CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  error.why = CUDA_GRAPH_INSTANTIATE_ERROR;
  if (handle == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    Graph* const graph = known_graph(graph_handle);
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Exec> exec;
    const CUresult result = instantiate(*graph, flags, exec, error);
    if (result != CUDA_SUCCESS) return result;
    *handle = reinterpret_cast<CUgraphExec>(exec.get());
    driver().execs.emplace(exec.get(), std::move(exec));
    return CUDA_SUCCESS;
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
    std::shared_ptr<Exec> exec;
    const Graph* const graph = known_graph(graph_handle);
    const CUresult result = find_exec(exec_handle, exec);
    if (result != CUDA_SUCCESS) return result;
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    outcome = update(*exec, *graph);
    const bool done = outcome.result == CU_GRAPH_EXEC_UPDATE_SUCCESS;
    return done ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  });
}

// The place in an executable graph of a node of its original graph.
CUresult find_place(const Exec& exec, CUgraphNode handle, std::size_t& place) {
  const Node* const node = known_node(handle);
  if (node == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto found = exec.structure->by_source.find(node->id);
  if (found == exec.structure->by_source.end()) return CUDA_ERROR_INVALID_VALUE;
  place = found->second;
  return CUDA_SUCCESS;
}

CUresult set_exec_command(Exec& exec, std::size_t place, Command command) {
  const Command& was = (*exec.states)[place].command;
  if (was.index() != command.index()) return CUDA_ERROR_INVALID_VALUE;
  if (check_change(was, command, false) != CU_GRAPH_EXEC_UPDATE_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
  if (auto* const kernel = std::get_if<KernelCommand>(&command)) {
    kernel->cooperative = std::get<KernelCommand>(was).cooperative;
  }
  if (auto* const set = std::get_if<SetCommand>(&command)) set->bytes_max = std::get<SetCommand>(was).bytes_max;
  exec.writable()[place].command = std::move(command);
  return CUDA_SUCCESS;
}

// read(context, Command&) fills in the command of a node of that type.
template <class Read>
CUresult set_exec_node(CUgraphExec exec_handle, CUgraphNode node, CUgraphNodeType type, Read read) {
  return with_context([&](Lock&, const std::shared_ptr<Context>& context) {
    std::shared_ptr<Exec> exec;
    CUresult result = find_exec(exec_handle, exec);
    std::size_t place = 0;
    if (result == CUDA_SUCCESS) result = find_place(*exec, node, place);
    if (result != CUDA_SUCCESS) return result;
    if (exec->structure->nodes[place].type != type) return CUDA_ERROR_INVALID_VALUE;
    Command command;
    result = read(context, command);
    return result == CUDA_SUCCESS ? set_exec_command(*exec, place, std::move(command)) : result;
  });
}

CUresult set_exec_child(CUgraphExec exec_handle, CUgraphNode node, CUgraph child_handle) {
  return with_driver([&](Lock&) {
    std::shared_ptr<Exec> exec;
    CUresult result = find_exec(exec_handle, exec);
    const Graph* const child = known_graph(child_handle);
    std::size_t place = 0;
    if (result == CUDA_SUCCESS) result = find_place(*exec, node, place);
    if (result != CUDA_SUCCESS) return result;
    if (child == nullptr || exec->structure->nodes[place].type != CU_GRAPH_NODE_TYPE_GRAPH) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const bool done = update(*exec, *child, place).result == CU_GRAPH_EXEC_UPDATE_SUCCESS;
    return done ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

// For kernels, fills and copies.
template <class F>
CUresult with_switch(CUgraphExec exec_handle, CUgraphNode node, F call) {
  return with_driver([&](Lock&) {
    std::shared_ptr<Exec> exec;
    CUresult result = find_exec(exec_handle, exec);
    std::size_t place = 0;
    if (result == CUDA_SUCCESS) result = find_place(*exec, node, place);
    if (result != CUDA_SUCCESS) return result;
    const CUgraphNodeType type = exec->structure->nodes[place].type;
    if (type != CU_GRAPH_NODE_TYPE_KERNEL && type != CU_GRAPH_NODE_TYPE_MEMSET && type != CU_GRAPH_NODE_TYPE_MEMCPY) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    call(*exec, place);
    return CUDA_SUCCESS;
  });
}

// call(exec, stream) with a launch's or an upload's graph and stream.
template <class F>
CUresult with_launch(CUgraphExec exec_handle, CUstream stream_handle, F call) {
  return with_driver([&](Lock& lock) {
    std::shared_ptr<Exec> exec;
    std::shared_ptr<Stream> stream;
    CUresult result = find_exec(exec_handle, exec);
    if (result == CUDA_SUCCESS) result = find_stream(stream_handle, stream);
    if (result == CUDA_SUCCESS) result = refuse_implicit(*stream);
    if (result == CUDA_SUCCESS) result = refuse_capturing(*stream);
    return result == CUDA_SUCCESS ? call(lock, exec, stream) : result;
  });
}

CUresult find_object(CUuserObject handle, unsigned count, UserObject*& object) {
  const auto found = driver().user_objects.find(reinterpret_cast<UserObject*>(handle));
  if (found == driver().user_objects.end() || count == 0 || count > INT_MAX) return CUDA_ERROR_INVALID_VALUE;
  object = found->second.get();
  return CUDA_SUCCESS;
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
  return with_driver([&](Lock&) {
    return driver().execs.erase(reinterpret_cast<Exec*>(handle)) == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  });
}

CUresult cuGraphExecGetFlags(CUgraphExec handle, cuuint64_t* flags) {
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    std::shared_ptr<Exec> exec;
    const CUresult result = find_exec(handle, exec);
    if (result == CUDA_SUCCESS) *flags = exec->flags;
    return result;
  });
}

// ---- launches

CUresult cuGraphLaunch(CUgraphExec exec_handle, CUstream stream_handle) {
  return with_launch(exec_handle, stream_handle,
                     [](Lock& lock, const auto& exec, const auto& stream) { return submit_exec(lock, stream, exec); });
}

CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) { return cuGraphLaunch(exec, per_thread(stream)); }

CUresult cuGraphUpload(CUgraphExec exec_handle, CUstream stream_handle) {
  return with_launch(exec_handle, stream_handle,
                     [](Lock& lock, const auto&, const auto& stream) { return submit_command(lock, stream, {}); });
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
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_KERNEL,
                       [&](const auto& context, Command& command) { return read_params(*params, context, command); });
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_KERNEL_NODE_PARAMS with = newer(*params);
  return cuGraphExecKernelNodeSetParams_v2(exec, node, &with);
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D* params, CUcontext) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_MEMCPY,
                       [&](const auto&, Command& command) { return read_params(*params, command); });
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* params,
                                        CUcontext) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_MEMSET,
                       [&](const auto&, Command& command) { return read_params(*params, command); });
}

CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_HOST,
                       [&](const auto&, Command& command) { return read_params(*params, command); });
}

CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                       [&](const auto&, Command& command) { return read_event(event, command); });
}

CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  return set_exec_node(exec, node, CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                       [&](const auto&, Command& command) { return read_event(event, command); });
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
  return set_exec_child(exec, node, child);
}

CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (params->type == CU_GRAPH_NODE_TYPE_GRAPH) return set_exec_child(exec, node, params->graph.graph);
  return set_exec_node(exec, node, params->type,
                       [&](const auto& context, Command& command) { return read_params(*params, context, command); });
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
  if (object == nullptr || destroy == nullptr || references == 0 || references > INT_MAX ||
      flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return with_driver([&](Lock&) {
    auto made = std::make_unique<UserObject>(UserObject{data, destroy, references});
    *object = reinterpret_cast<CUuserObject>(made.get());
    driver().user_objects.emplace(made.get(), std::move(made));
    return CUDA_SUCCESS;
  });
}

CUresult cuUserObjectRetain(CUuserObject handle, unsigned count) {
  return with_driver([&](Lock&) {
    UserObject* object = nullptr;
    const CUresult result = find_object(handle, count, object);
    if (result == CUDA_SUCCESS) object->references += count;
    return result;
  });
}

CUresult cuUserObjectRelease(CUuserObject handle, unsigned count) {
  return with_driver([&](Lock&) {
    UserObject* object = nullptr;
    const CUresult result = find_object(handle, count, object);
    if (result == CUDA_SUCCESS) release_references(*object, count);
    return result;
  });
}

CUresult cuGraphRetainUserObject(CUgraph handle, CUuserObject object_handle, unsigned count, unsigned flags) {
  if ((flags & ~static_cast<unsigned>(CU_GRAPH_USER_OBJECT_MOVE)) != 0) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) {
    UserObject* object = nullptr;
    Graph* const graph = known_graph(handle);
    const CUresult result = find_object(object_handle, count, object);
    if (result != CUDA_SUCCESS || graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    graph->holds.add(*object, count, flags == CU_GRAPH_USER_OBJECT_MOVE);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphReleaseUserObject(CUgraph handle, CUuserObject object_handle, unsigned count) {
  return with_driver([&](Lock&) {
    UserObject* object = nullptr;
    Graph* const graph = known_graph(handle);
    const CUresult result = find_object(object_handle, count, object);
    if (result != CUDA_SUCCESS || graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return graph->holds.remove(*object, count) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

}  // extern "C"
#pragma GCC visibility pop
