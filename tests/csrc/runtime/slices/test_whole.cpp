// Graphs that are not cut, one for each reason that the simulated driver can make: beside a latency client each is
// launched as the program made it, all of its nodes run, and the state says why.
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/log.hpp"
#include "graph_program.hpp"

namespace cudasched::test {
namespace {

using graph::WholeReason;

// What a driver answers or refuses in place of the simulated one.
struct Injected {
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;  // of empty nodes
  CUresult status = CUDA_SUCCESS;
  std::atomic<CUgraphExec> first_slice{nullptr};
  std::atomic<CUgraphExec> third_slice{nullptr};
  std::atomic<int> slices{0};
  driver::Driver real;
} injected;

bool is_builder() {
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::string_view(name) == "cudasched-graph";
}

CUresult type_of_another(CUgraphNode node, CUgraphNodeType* type) {
  const CUresult status = injected.real.cuGraphNodeGetType(node, type);
  if (status == CUDA_SUCCESS && *type == CU_GRAPH_NODE_TYPE_EMPTY) *type = injected.type;
  return status;
}
CUresult a_million_nodes_and_more(CUgraph graph, CUgraphNode* nodes, std::size_t* count) {
  if (nodes != nullptr) return injected.real.cuGraphGetNodes(graph, nodes, count);
  *count = (std::size_t{1} << 20) + 1;
  return CUDA_SUCCESS;
}
CUresult clone_nothing(CUgraph*, CUgraph) { return injected.status; }
CUresult clone_nothing_for_the_builder(CUgraph* made, CUgraph of) {
  return is_builder() ? injected.status : injected.real.cuGraphClone(made, of);
}
CUresult clone_less(CUgraph* made, CUgraph of) {
  const CUresult status = injected.real.cuGraphClone(made, of);
  if (status != CUDA_SUCCESS) return status;
  std::size_t count = 0;
  Program::check(injected.real.cuGraphGetNodes(*made, nullptr, &count));
  std::vector<CUgraphNode> nodes(count);
  Program::check(injected.real.cuGraphGetNodes(*made, nodes.data(), &count));
  Program::check(injected.real.cuGraphDestroyNode(nodes.back()));
  return status;
}
CUresult clone_less_for_the_builder(CUgraph* made, CUgraph of) {
  return is_builder() ? clone_less(made, of) : injected.real.cuGraphClone(made, of);
}
// As where nodes of a clone came in another order.
CUresult find_another_in_clone(CUgraphNode* found, CUgraphNode, CUgraph clone) {
  std::size_t count = 1;
  return injected.real.cuGraphGetNodes(clone, found, &count);
}
CUresult destroy_no_node(CUgraphNode) { return injected.status; }
CUresult instantiate_no_slice(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  return is_builder() ? injected.status : injected.real.cuGraphInstantiateWithFlags(exec, graph, flags);
}
// Some slices are there by then.
CUresult instantiate_three_slices(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  static thread_local int made = 0;
  if (is_builder() && ++made % 4 == 0) return injected.status;
  return injected.real.cuGraphInstantiateWithFlags(exec, graph, flags);
}
CUresult upload_no_slice(CUgraphExec exec, CUstream stream) {
  return is_builder() ? injected.status : injected.real.cuGraphUpload(exec, stream);
}
CUresult create_no_event(CUevent* event, unsigned flags) {
  return is_builder() ? injected.status : injected.real.cuEventCreate(event, flags);
}
CUresult instantiate_and_note(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  const CUresult status = injected.real.cuGraphInstantiateWithFlags(exec, graph, flags);
  if (!is_builder()) return status;
  if (injected.slices.fetch_add(1) == 0) injected.first_slice = *exec;
  if (injected.slices == 3) injected.third_slice = *exec;
  return status;
}

class Whole;

struct Case {
  const char* name;
  WholeReason reason;
  CUgraphExec (*make)(Whole&);
  bool is_failure = false;
};
std::ostream& operator<<(std::ostream& out, const Case& of) { return out << of.name; }

class Whole : public GraphProgram, public ::testing::WithParamInterface<Case> {
 public:
  static constexpr std::uint64_t kKernels = 40;

  Whole() {
    configure(When::kAuto);
    injected.real = driver::table();
    log::set_file(log_path_);
  }
  ~Whole() override {
    for (const auto& restore : restore_) restore();
    log::set_file("");
  }

  template <typename Function>
  void inject(Function* driver::Driver::*entry, std::type_identity_t<Function*> with) {
    driver::table().*entry = with;
    restore_.push_back([=] { driver::table().*entry = injected.real.*entry; });
  }

  // A chain, and what keeps it whole behind that.
  CUgraph long_graph() {
    CUgraph graph = new_graph();
    last_ = chain(graph, 1, kKernels).back();
    return graph;
  }
  CUgraphExec long_exec() { return instantiate(long_graph()); }
  CUgraphNode any_node(CUgraph graph, CUgraphNodeParams& parameters) {
    CUgraphNode node = nullptr;
    Program::check(call<decltype(cuGraphAddNode)>("cuGraphAddNode_v2")(&node, graph, &last_, nullptr, 1, &parameters));
    return node;
  }
  void memory_node(CUgraph graph, CUgraphNode after) {
    CUDA_MEM_ALLOC_NODE_PARAMS memory{};
    memory.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    memory.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    memory.bytesize = 4096;
    CUgraphNode node = nullptr;
    CUgraphNode freed = nullptr;
    Program::check(call<decltype(cuGraphAddMemAllocNode)>("cuGraphAddMemAllocNode")(&node, graph, &after, 1, &memory));
    Program::check(
        call<decltype(cuGraphAddMemFreeNode)>("cuGraphAddMemFreeNode")(&freed, graph, &node, 1, memory.dptr));
  }
  CUgraphExec with_node_of_type(CUgraphNodeType type) {
    CUgraph graph = long_graph();
    CUgraphNode node = nullptr;
    Program::check(call<decltype(cuGraphAddEmptyNode)>("cuGraphAddEmptyNode")(&node, graph, &last_, 1));
    injected.type = type;
    inject(&driver::Driver::cuGraphNodeGetType, &type_of_another);
    return instantiate(graph);
  }

  std::size_t warnings() const {
    std::ifstream file(log_path_);
    std::size_t count = 0;
    for (std::string line; std::getline(file, line);) {
      if (line.find("could not be cut into slices (" + std::string(graph::name(GetParam().reason)) + ")") !=
          std::string::npos) {
        ++count;
      }
    }
    return count;
  }

  std::vector<std::function<void()>> restore_;
  CUgraphNode last_ = nullptr;
  std::vector<std::uint64_t> wanted_ = numbers(1, kKernels);  // that one launch runs
  bool any_order_ = false;
  std::vector<std::uint64_t> in_order(std::vector<std::uint64_t> values) const {
    if (any_order_) std::sort(values.begin(), values.end());
    return values;
  }
  const std::string log_path_ = HookedDriver::instance().run_directory() + "/log";
};

// A driver that refuses something, with kStatus where the function leaves that open, or does it badly.
template <auto kEntry, auto kFunction, CUresult kStatus = CUDA_ERROR_NOT_SUPPORTED>
constexpr Case fault(const char* name, WholeReason reason) {
  return {name, reason,
          [](Whole& test) {
            injected.status = kStatus;
            test.inject(kEntry, kFunction);
            return test.long_exec();
          },
          true};
}

using driver::Driver;
const Case kCases[] = {
    {"memory", WholeReason::kMemoryNode,
     [](Whole& test) {
       CUgraph graph = test.long_graph();
       test.memory_node(graph, test.last_);
       return test.instantiate(graph);
     }},
    {"memory_in_a_child", WholeReason::kMemoryNode,
     [](Whole& test) {
       CUgraph graph = test.long_graph();
       CUgraph child = nullptr;
       Program::check(call<CUresult(CUgraph*, unsigned)>("cuGraphCreate")(&child, 0));
       test.memory_node(child, test.kernel(child, Whole::kKernels + 1));
       test.wanted_.push_back(Whole::kKernels + 1);
       CUgraphNodeParams parameters{};
       parameters.type = CU_GRAPH_NODE_TYPE_GRAPH;
       parameters.graph.graph = child;
       parameters.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
       test.any_node(graph, parameters);
       return test.instantiate(graph);
     }},
    {"conditional", WholeReason::kConditionalNode,
     [](Whole& test) {
       CUgraph graph = test.long_graph();
       CUgraphNodeParams parameters{};
       parameters.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
       Program::check(call<decltype(cuGraphConditionalHandleCreate)>("cuGraphConditionalHandleCreate")(
           &parameters.conditional.handle, graph, nullptr, 1, CU_GRAPH_COND_ASSIGN_DEFAULT));
       parameters.conditional.type = CU_GRAPH_COND_TYPE_IF;
       parameters.conditional.size = 1;
       test.any_node(graph, parameters);
       test.kernel(parameters.conditional.phGraph_out[0], Whole::kKernels + 1);
       test.wanted_.push_back(Whole::kKernels + 1);
       return test.instantiate(graph);
     }},
    {"event", WholeReason::kEventNode,
     [](Whole& test) {
       CUgraph graph = test.long_graph();
       CUevent event = nullptr;
       Program::check(call<decltype(cuEventCreate)>("cuEventCreate")(&event, CU_EVENT_DISABLE_TIMING));
       CUgraphNode node = nullptr;
       Program::check(
           call<decltype(cuGraphAddEventRecordNode)>("cuGraphAddEventRecordNode")(&node, graph, &test.last_, 1, event));
       return test.instantiate(graph);
     }},
    // The simulated driver has no such nodes.
    {"batch_memory", WholeReason::kBatchMemoryNode,
     [](Whole& test) { return test.with_node_of_type(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP); }},
    {"semaphore_signal", WholeReason::kSemaphoreNode,
     [](Whole& test) { return test.with_node_of_type(CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL); }},
    {"semaphore_wait", WholeReason::kSemaphoreNode,
     [](Whole& test) { return test.with_node_of_type(CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT); }},
    {"of_the_future", WholeReason::kUnknownNode,
     [](Whole& test) { return test.with_node_of_type(static_cast<CUgraphNodeType>(15)); }},
    {"device_updatable", WholeReason::kDeviceUpdatable,
     [](Whole& test) {
       CUgraph graph = test.long_graph();
       CUkernelNodeAttrValue value{};
       value.deviceUpdatableKernelNode.deviceUpdatable = 1;
       Program::check(call<decltype(cuGraphKernelNodeSetAttribute)>("cuGraphKernelNodeSetAttribute")(
           test.last_, CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, &value));
       return test.instantiate(graph);
     }},
    {"device_launch", WholeReason::kDeviceLaunch,
     [](Whole& test) { return test.instantiate(test.long_graph(), CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH); }},
    {"an_unknown_flag", WholeReason::kUnknownNode,
     [](Whole& test) {
       test.inject(&driver::Driver::cuGraphInstantiateWithFlags,
                   [](CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
                     return injected.real.cuGraphInstantiateWithFlags(exec, graph, flags & 0xff);
                   });
       return test.instantiate(test.long_graph(), 1ULL << 20);
     }},
    {"another_context", WholeReason::kSeveralDevices,
     [](Whole& test) {
       CUgraph graph = test.long_graph();
       CUcontext other = nullptr;
       Program::check(call<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&other, 0, 0));
       CUfunction function = test.load("kernel short params=8,8,8 block_us=20 blocks_per_sm=4 effect=append", "short");
       Program::check(call<CUresult(CUcontext)>("cuCtxSetCurrent")(test.program_.context()));
       test.kernel(graph, Whole::kKernels + 1, {test.last_}, function);
       test.wanted_.push_back(Whole::kKernels + 1);
       return test.instantiate(graph);
     }},
    {"green_context", WholeReason::kGreenContext,
     [](Whole& test) {
       CUgraph graph = test.long_graph();
       CUdevResource all{};
       CUdevResourceDesc description = nullptr;
       CUgreenCtx green = nullptr;
       CUcontext context = nullptr;
       Program::check(
           call<decltype(cuDeviceGetDevResource)>("cuDeviceGetDevResource")(0, &all, CU_DEV_RESOURCE_TYPE_SM));
       Program::check(call<decltype(cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc")(&description, &all, 1));
       Program::check(
           call<decltype(cuGreenCtxCreate)>("cuGreenCtxCreate")(&green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
       Program::check(call<decltype(cuCtxFromGreenCtx)>("cuCtxFromGreenCtx")(&context, green));
       Program::check(call<CUresult(CUcontext)>("cuCtxSetCurrent")(context));
       CUgraphExec exec = test.instantiate(graph);
       Program::check(call<CUresult(CUcontext)>("cuCtxSetCurrent")(test.program_.context()));
       return exec;
     }},
    {"deep_children", WholeReason::kChildTooDeep,
     [](Whole& test) {
       CUgraph inner = test.new_graph();
       test.kernel(inner, Whole::kKernels + 1);
       for (int i = 0; i < 8; ++i) {
         CUgraph outer = test.new_graph();
         test.child(outer, inner);
         inner = outer;
       }
       CUgraph graph = test.long_graph();
       test.child(graph, inner, {test.last_});
       test.wanted_.push_back(Whole::kKernels + 1);
       return test.instantiate(graph);
     }},
    {"too_many_nodes", WholeReason::kTooLarge,
     [](Whole& test) {
       CUgraph graph = test.long_graph();
       test.inject(&driver::Driver::cuGraphGetNodes, &a_million_nodes_and_more);
       return test.instantiate(graph);
     }},
    {"short", WholeReason::kShort,
     [](Whole& test) {
       test.configure(Whole::When::kAuto, kNsPerSecond);
       return test.long_exec();
     }},
    {"one_node", WholeReason::kOneNode,
     [](Whole& test) {
       CUgraph graph = test.new_graph();
       test.kernel(graph, 1);
       test.wanted_ = {1};
       return test.instantiate(graph);
     }},
    {"parallel_kernels", WholeReason::kBranches,
     [](Whole& test) {
       test.configure(Whole::When::kAuto, 1'000);
       CUgraph graph = test.new_graph();
       for (int i = 0; i < 3; ++i) test.kernel(graph, 1);
       test.wanted_ = {1, 1, 1};
       return test.instantiate(graph);
     }},
    // A collective, and a chain that nothing orders to it.
    {"collective_beside", WholeReason::kWaits,
     [](Whole& test) {
       CUgraph graph = test.long_graph();
       test.kernel(graph, 1, {},
                   test.load("kernel ncclKernel params=8,8,8 block_us=20 blocks_per_sm=4 effect=append", "ncclKernel"));
       test.wanted_.push_back(1);
       test.any_order_ = true;
       return test.instantiate(graph);
     }},
    fault<&Driver::cuGraphClone, &clone_nothing>("not_cloned", WholeReason::kNotCloned),
    fault<&Driver::cuGraphClone, &clone_nothing_for_the_builder>("not_cloned_by_the_builder", WholeReason::kNotCloned),
    fault<&Driver::cuGraphClone, &clone_less>("cloned_without_a_node", WholeReason::kCloneDiffers),
    fault<&Driver::cuGraphNodeFindInClone, &find_another_in_clone>("cloned_in_another_order",
                                                                   WholeReason::kCloneDiffers),
    fault<&Driver::cuGraphClone, &clone_less_for_the_builder>("cloned_without_a_node_by_the_builder",
                                                              WholeReason::kCloneDiffers),
    fault<&Driver::cuGraphDestroyNode, &destroy_no_node>("nodes_stay", WholeReason::kNotBuilt),
    fault<&Driver::cuGraphInstantiateWithFlags, &instantiate_no_slice>("slice_not_instantiated",
                                                                       WholeReason::kNotBuilt),
    fault<&Driver::cuGraphUpload, &upload_no_slice>("slice_not_uploaded", WholeReason::kNotBuilt),
    fault<&Driver::cuEventCreate, &create_no_event>("no_event", WholeReason::kNotBuilt),
    fault<&Driver::cuGraphInstantiateWithFlags, &instantiate_three_slices, CUDA_ERROR_OUT_OF_MEMORY>(
        "no_memory_for_a_slice", WholeReason::kNoMemory),
    fault<&Driver::cuGraphUpload, &upload_no_slice, CUDA_ERROR_OUT_OF_MEMORY>("no_memory_to_upload",
                                                                              WholeReason::kNoMemory),
};

TEST_P(Whole, StaysWholeRunsRightAndSaysWhy) {
  const auto place = static_cast<std::size_t>(GetParam().reason);
  const OtherClient other(/*active=*/false);
  const InRegion region(CUDASCHED_BEST_EFFORT);
  const State before = state();
  for (std::uint64_t graphs = 1; graphs <= 2; ++graphs) {
    wanted_ = numbers(1, kKernels);
    CUgraphExec exec = GetParam().make(*this);
    ASSERT_TRUE(eventually([&] {
      clear_log();
      Program::check(launch(exec));
      EXPECT_EQ(in_order(ran()), in_order(wanted_));
      return ::testing::Test::HasFailure() || state().graphs_whole[place] == graphs;
    }));
    clear_log();
    for (int i = 0; i < 3; ++i) ASSERT_EQ(launch(exec), CUDA_SUCCESS);
    std::vector<std::uint64_t> wanted;
    for (int i = 0; i < 3; ++i) append(wanted, wanted_);
    EXPECT_EQ(in_order(ran()), in_order(wanted));
    // What is no fault of the driver's is not worth a warning, and one is enough.
    EXPECT_TRUE(!GetParam().is_failure || eventually([&] { return warnings() > 0; }));
  }
  EXPECT_EQ(warnings(), GetParam().is_failure ? 1U : 0U);
  const State after = state();
  EXPECT_EQ(after.sliced_launches, before.sliced_launches);
  EXPECT_EQ(after.graphs_sliced, 0U);
  EXPECT_EQ(after.graph_slice_bytes, 0U);
  EXPECT_EQ(after.longest_whole_graph_ns > 0, GetParam().reason != WholeReason::kTooLarge);
}

INSTANTIATE_TEST_SUITE_P(Reasons, Whole, ::testing::ValuesIn(kCases),
                         [](const auto& of) { return std::string(of.param.name); });

// Slices are there, known to the driver alone, which then will not have one of them: to it there is no such graph.
class WithoutASlice : public GraphProgram {
 protected:
  WithoutASlice() { exec_ = new_chain().exec; }

  using Instantiate = decltype(driver::Driver::cuGraphInstantiateWithFlags);
  static Instantiate& noted() {
    injected.real = driver::table();
    injected.slices = 0;
    return driver::table().cuGraphInstantiateWithFlags;
  }

  const Replaced<Instantiate, decltype(instantiate_and_note)> noted_{noted(), &instantiate_and_note};
  const OtherClient other_{/*active=*/false};
  const InRegion region_{CUDASCHED_BEST_EFFORT};
  CUgraphExec exec_ = nullptr;
};

TEST_F(WithoutASlice, AGraphWhoseFirstSliceIsRefusedGoesWholeFromThenOn) {
  ASSERT_TRUE(has_slices(exec_));
  const State before = state();
  Program::check(driver::table().cuGraphExecDestroy(injected.first_slice));
  for (int i = 0; i < 5; ++i) ASSERT_EQ(launch(exec_), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40, 5));
  EXPECT_EQ(state().graphs_whole[static_cast<std::size_t>(WholeReason::kRefused)], 1U);
  EXPECT_EQ(state().graphs_sliced, 0U);
  EXPECT_EQ(state().slice_launches, before.slice_launches + 1);            // asked once
  EXPECT_TRUE(eventually([] { return state().graph_slice_bytes == 0; }));  // nor do they keep their memory
  ASSERT_EQ(launch(exec_), CUDA_SUCCESS);
  EXPECT_EQ(ran(), numbers(1, 40, 6));
  EXPECT_EQ(state().graphs_whole[static_cast<std::size_t>(WholeReason::kRefused)], 1U);
}

// As it is of a whole graph that fails midway: what ran has run, once.
TEST_F(WithoutASlice, AnErrorOfALaterOneIsTheLaunchs) {
  ASSERT_TRUE(has_slices(exec_));
  ASSERT_GE(injected.slices, 3);
  Program::check(driver::table().cuGraphExecDestroy(injected.third_slice));
  const CUresult launched = launch(exec_);
  const CUresult synchronised = program_.synchronize();
  EXPECT_TRUE((launched == CUDA_SUCCESS) != (synchronised == CUDA_SUCCESS)) << launched << " " << synchronised;
  const std::vector<std::uint64_t> values = ran();
  EXPECT_GT(values.size(), 0U);
  EXPECT_LT(values.size(), 40U);
  EXPECT_EQ(values, numbers(1, values.size()));
  EXPECT_EQ(state().graphs_sliced, 1U);
}

}  // namespace
}  // namespace cudasched::test
