#include "runtime/graphs.hpp"

#include <algorithm>
#include <exception>
#include <new>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/hash.hpp"
#include "driver/driver.hpp"
#include "driver/functions.hpp"

namespace cudasched::runtime {
namespace {

constexpr std::int64_t kNodeGapNs = 1'000;     // from the end of a node to the start of the next
constexpr std::int64_t kHostNs = 10'000;       // a host function
constexpr std::int64_t kTransferNs = 1'500;    // a copy or a fill of nothing
constexpr double kDeviceBytesPerNs = 2'000.0;  // within the device
constexpr double kHostBytesPerNs = 25.0;       // over PCIe
constexpr int kDeepest = 8;                    // of child graphs
constexpr std::size_t kMostNodes = std::size_t{1} << 20;

struct Walk {
  std::int64_t longest_ns = 0;
  std::uint64_t hash = 0;
  std::uint32_t nodes = 0;
  bool plain = true;
};

// Predicts the kernels of a graph. Asks the driver once for the residency that several kernels have in common.
class Kernels {
 public:
  explicit Kernels(const Graphs::Estimate& estimate) : estimate_(estimate) {}

  std::int64_t node_ns(CUgraphNode node, std::uint64_t& hash);

 private:
  predict::Residency residency_of(const predict::Launch& launch);

  const Graphs::Estimate& estimate_;
  std::optional<predict::Residency> device_;                     // without blocks
  std::unordered_map<std::uint64_t, predict::Residency> known_;  // by function, threads and shared memory
  std::vector<std::uint32_t> block_;
};

Walk walk(CUgraph graph, Kernels& kernels, int depth);

predict::Residency Kernels::residency_of(const predict::Launch& launch) {
  const std::uint64_t key = mix(mix(reinterpret_cast<std::uintptr_t>(launch.function), launch.threads_per_block()),
                                launch.dynamic_shared_bytes);
  const auto [found, is_new] = known_.try_emplace(key);
  predict::Residency& residency = found->second;
  if (!is_new) return residency;
  if (!device_) {
    device_.emplace();
    CUdevice device = 0;
    if (driver::table().cuCtxGetDevice(&device) == CUDA_SUCCESS) {
      device_->sm_count = driver::device_attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
      device_->max_threads_per_sm =
          driver::device_attribute(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
    }
  }
  residency = *device_;
  driver::ask_occupancy(launch, residency.blocks_per_sm);
  return residency;
}

std::int64_t Kernels::node_ns(CUgraphNode node, std::uint64_t& hash) {
  CUDA_KERNEL_NODE_PARAMS parameters{};
  if (driver::table().cuGraphKernelNodeGetParams(node, &parameters) != CUDA_SUCCESS) return 0;
  const void* const function = parameters.func != nullptr ? static_cast<const void*>(parameters.func)
                                                          : static_cast<const void*>(parameters.kern);
  const predict::Launch launch{.function = function,
                               .grid = {parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ},
                               .block = {parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ},
                               .dynamic_shared_bytes = parameters.sharedMemBytes,
                               .parameters = parameters.kernelParams,
                               .extra = parameters.extra};
  const driver::KernelFacts* const known = driver::functions().find(function);
  block_.clear();
  if (known != nullptr) {
    block_.resize(known->facts.parameter_bytes / 4);
    block_.resize(known->gather(launch, block_.data()));
    hash = mix(hash, known->facts.identity);
  }
  for (int i = 0; i < 3; ++i) hash = mix(hash, std::uint64_t{launch.grid[i]} << 32 | launch.block[i]);
  return estimate_({.launch = launch,
                    .function = known == nullptr ? nullptr : &known->facts,
                    .words = block_,
                    .residency = residency_of(launch)});
}

std::int64_t transfer_ns(double bytes, double bytes_per_ns) {
  return kTransferNs + static_cast<std::int64_t>(std::min(bytes / bytes_per_ns, 1e9));
}

std::int64_t node_ns(CUgraphNode node, Kernels& kernels, int depth, std::uint64_t& hash, bool& plain) {
  const auto& driver = driver::table();
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  if (driver.cuGraphNodeGetType(node, &type) != CUDA_SUCCESS) {
    plain = false;
    return 0;
  }
  hash = mix(hash, static_cast<std::uint64_t>(type));
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return kernels.node_ns(node, hash);
    case CU_GRAPH_NODE_TYPE_MEMCPY: {
      CUDA_MEMCPY3D copy{};
      if (driver.cuGraphMemcpyNodeGetParams(node, &copy) != CUDA_SUCCESS) break;
      const double bytes = static_cast<double>(copy.WidthInBytes) *
                           static_cast<double>(std::max<std::size_t>(1, copy.Height)) *
                           static_cast<double>(std::max<std::size_t>(1, copy.Depth));
      const bool host = copy.srcMemoryType == CU_MEMORYTYPE_HOST || copy.dstMemoryType == CU_MEMORYTYPE_HOST;
      return transfer_ns(bytes, host ? kHostBytesPerNs : kDeviceBytesPerNs);
    }
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      CUDA_MEMSET_NODE_PARAMS fill{};
      if (driver.cuGraphMemsetNodeGetParams(node, &fill) != CUDA_SUCCESS) break;
      return transfer_ns(static_cast<double>(fill.width) * fill.elementSize * static_cast<double>(fill.height),
                         kDeviceBytesPerNs);
    }
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      CUgraph child = nullptr;
      if (depth >= kDeepest || driver.cuGraphChildGraphNodeGetGraph(node, &child) != CUDA_SUCCESS) {
        plain = false;
        break;
      }
      const Walk inner = walk(child, kernels, depth + 1);
      hash = mix(hash, inner.hash);
      plain = plain && inner.plain;
      return inner.longest_ns;
    }
    case CU_GRAPH_NODE_TYPE_HOST:
      return kHostNs;
    case CU_GRAPH_NODE_TYPE_EMPTY:
      break;
    default:
      plain = false;
      break;  // events, waits, memory, conditional bodies: nothing, or not to be known
  }
  return 0;
}

Walk walk(CUgraph graph, Kernels& kernels, int depth) {
  Walk result;
  const auto& driver = driver::table();
  std::size_t count = 0;
  result.plain = false;
  if (driver.cuGraphGetNodes(graph, nullptr, &count) != CUDA_SUCCESS || count > kMostNodes) return result;
  std::vector<CUgraphNode> nodes(count);
  if (count > 0 && driver.cuGraphGetNodes(graph, nodes.data(), &count) != CUDA_SUCCESS) return result;
  result.plain = true;
  result.nodes = static_cast<std::uint32_t>(count);

  std::unordered_map<CUgraphNode, std::size_t> place;
  place.reserve(count);
  std::vector<std::int64_t> own_ns(count);
  for (std::size_t i = 0; i < count; ++i) {
    place[nodes[i]] = i;
    own_ns[i] = node_ns(nodes[i], kernels, depth, result.hash, result.plain);
  }
  std::size_t edges = 0;
  std::vector<CUgraphNode> from;
  std::vector<CUgraphNode> to;
  if (driver.cuGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges) == CUDA_SUCCESS && edges > 0) {
    from.resize(edges);
    to.resize(edges);
    std::vector<CUgraphEdgeData> data(edges);
    if (driver.cuGraphGetEdges(graph, from.data(), to.data(), data.data(), &edges) != CUDA_SUCCESS) edges = 0;
  }
  // The nodes behind each node i: next[first[i]] to next[first[i + 1] - 1].
  std::vector<std::pair<std::size_t, std::size_t>> ends(edges);
  std::vector<std::size_t> first(count + 1, 0);
  std::vector<std::size_t> open(count, 0);  // predecessors not yet walked
  for (std::size_t i = 0; i < edges; ++i) {
    ends[i] = {place[from[i]], place[to[i]]};
    ++first[ends[i].first];
    ++open[ends[i].second];
    result.hash = mix(result.hash, std::uint64_t{ends[i].first} << 32 | ends[i].second);
  }
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<std::size_t> next(edges);
  for (const auto& [before, after] : ends) next[--first[before]] = after;
  std::vector<std::int64_t> start_ns(count, 0);
  std::vector<std::size_t> ready;
  for (std::size_t i = 0; i < count; ++i) {
    if (open[i] == 0) ready.push_back(i);
  }
  while (!ready.empty()) {
    const std::size_t node = ready.back();
    ready.pop_back();
    const std::int64_t end_ns = start_ns[node] + own_ns[node];
    result.longest_ns = std::max(result.longest_ns, end_ns);
    for (std::size_t i = first[node]; i < first[node + 1]; ++i) {
      const std::size_t after = next[i];
      start_ns[after] = std::max(start_ns[after], end_ns + (own_ns[node] > 0 ? kNodeGapNs : 0));
      if (--open[after] == 0) ready.push_back(after);
    }
  }
  return result;
}

}  // namespace

std::int64_t predicted_node_ns(CUgraphNode node, const Graphs::Estimate& estimate) {
  std::uint64_t hash = 0;
  bool plain = true;
  Kernels kernels(estimate);
  const std::int64_t own_ns = node_ns(node, kernels, 0, hash, plain);
  return own_ns > 0 ? own_ns + kNodeGapNs : 0;
}

void Graphs::note(CUgraphExec exec, CUgraph graph, const Estimate& estimate) noexcept {
  if (exec == nullptr) return;
  try {
    const driver::RelaxedCapture relaxed;
    Kernels kernels(estimate);
    const Walk walked = walk(graph, kernels, 0);
    driver::registry().made(exec, {walked.hash | 1, walked.longest_ns, walked.nodes, walked.plain});
  } catch (const std::exception&) {
    driver::registry().forget(exec);  // no memory, or a device that is gone: no prediction
  }
}

bool Graphs::wants_note(CUgraphExec exec) noexcept {
  if (!find(exec)) return true;
  const std::scoped_lock lock(mutex_);
  try {
    const std::uint32_t updates = ++updates_[exec];
    return updates <= kFirstUpdates || updates % kUpdates == 0;
  } catch (const std::exception&) {
    return true;
  }
}

void Graphs::forget(CUgraphExec exec) noexcept {
  driver::registry().forget(exec);
  const std::scoped_lock lock(mutex_);
  priorities_.erase(exec);
  updates_.erase(exec);
}

bool Graphs::note_priority(CUgraphExec exec, GivenPriority priority) noexcept {
  const std::scoped_lock lock(mutex_);
  try {
    priorities_.insert_or_assign(exec, priority);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

std::optional<GivenPriority> Graphs::priority(CUgraphExec exec) const noexcept {
  const std::scoped_lock lock(mutex_);
  const auto found = priorities_.find(exec);
  return found == priorities_.end() ? std::nullopt : std::optional(found->second);
}

void Graphs::reset_in_child() noexcept {
  new (&mutex_) std::mutex;
  new (&priorities_) std::unordered_map<CUgraphExec, GivenPriority>;
  new (&updates_) std::unordered_map<CUgraphExec, std::uint32_t>;
}

}  // namespace cudasched::runtime
