#include "runtime/slices/change.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <set>
#include <type_traits>
#include <utility>

#include "driver/driver.hpp"
#include "driver/functions.hpp"

namespace cudasched::runtime {
namespace {

using driver::table;

enum class Kind : std::uint8_t {
  kKernel,
  kCopy,
  kFill,
  kHost,
  kSwitch,
  kGraph,
  kLike,  // of a kernel whose parameters are not described: as a node of a graph of ours is when it is made
};

// What the bytes begin with. Behind it, of a kernel: the list of its parameters, then what they lead to; while it
// waits, the list holds where in the bytes they are.
struct Header {
  Kind kind = Kind::kLike;
  std::uint32_t place = 0;
  std::uint32_t parameters = 0;
  union {
    CUDA_KERNEL_NODE_PARAMS kernel;
    CUDA_MEMCPY3D copy;
    CUDA_MEMSET_NODE_PARAMS fill;
    CUDA_HOST_NODE_PARAMS host;
    unsigned enabled;
    OwnedGraph* graph;
    CUgraphNode like;
  };

  Header() noexcept : like(nullptr) {}
};
static_assert(std::is_trivially_copyable_v<Header>);

constexpr std::size_t aligned(std::size_t bytes) noexcept { return (bytes + 15) & ~std::size_t{15}; }

std::vector<std::byte> bytes_of(const Header& header) {
  std::vector<std::byte> bytes(aligned(sizeof header));
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

// The parameters, by their sizes. False where these are not known.
bool pack(const CUDA_KERNEL_NODE_PARAMS& kernel, std::uint32_t place, std::vector<std::byte>& bytes) {
  const void* const function =
      kernel.func != nullptr ? static_cast<const void*>(kernel.func) : static_cast<const void*>(kernel.kern);
  const driver::KernelFacts* const facts = driver::functions().find(function);
  if (facts == nullptr || !facts->described || kernel.extra != nullptr) return false;
  if (!facts->parameters.empty() && kernel.kernelParams == nullptr) return false;
  Header header;
  header.kind = Kind::kKernel;
  header.place = place;
  header.parameters = static_cast<std::uint32_t>(facts->parameters.size());
  header.kernel = kernel;
  const std::size_t list = aligned(sizeof header);
  const std::size_t block = list + aligned(header.parameters * sizeof(void*));
  bytes.resize(block + facts->block_bytes);
  std::memcpy(bytes.data(), &header, sizeof header);
  for (std::size_t i = 0; i < facts->parameters.size(); ++i) {
    const driver::Parameter parameter = facts->parameters[i];
    const std::uint64_t where = block + parameter.offset;
    std::memcpy(bytes.data() + list + i * sizeof where, &where, sizeof where);
    std::memcpy(bytes.data() + where, kernel.kernelParams[i], parameter.bytes);
  }
  return true;
}

// What `from` has, into a header of that kind.
template <typename Parameters>
bool read(Header& header, Kind kind, Parameters Header::*into, CUgraphNode from,
          CUresult (*get)(CUgraphNode, Parameters*)) noexcept {
  Parameters parameters{};
  if (get == nullptr || get(from, &parameters) != CUDA_SUCCESS) return false;
  header.kind = kind;
  header.*into = parameters;
  return true;
}

// Of the nodes of `graph` those of slices become: of all, or of those inside of a child graph.
bool take_over(CUgraph graph, std::uint32_t place, const Pieces& pieces, std::optional<int> priority) {
  const bool whole = place == Change::kWhole;
  if (!whole && !pieces.children) {
    return table().graph_update_child != nullptr &&
           table().graph_update_child(pieces.exec_of(place), pieces.handles[place], graph) == CUDA_SUCCESS;
  }
  ReadGraph now;
  const std::size_t first = whole ? 0 : place + 2;  // behind a child graph's own node and its beginning
  if (!read_graph(graph, pieces.children, now) || first + now.handles.size() > pieces.handles.size() ||
      (whole && now.handles.size() != pieces.handles.size())) {
    return false;
  }
  std::set<std::uint32_t> changed;
  for (std::size_t i = 0; i < now.handles.size(); ++i) {
    if (now.is_mark(i)) continue;
    if (!copy_node(pieces.handles[first + i], now.handles[i])) return false;
    changed.insert(pieces.piece_of[first + i]);
  }
  return std::all_of(changed.begin(), changed.end(),
                     [&](std::uint32_t piece) { return refresh(pieces.pieces[piece], priority); });
}

}  // namespace

OwnedGraph own(CUgraph graph) {
  return {graph, [](CUgraph of) { table().graph_clone_destroy(of); }};
}

Change Change::of_node(CUgraphNode from, std::uint32_t place) {
  const driver::Driver& driver = table();
  Change change;
  Header header;
  header.place = place;
  header.like = from;
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  bool known = driver.graph_node_get_type(from, &type) == CUDA_SUCCESS;
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      CUDA_KERNEL_NODE_PARAMS kernel{};
      known = known && driver.graph_kernel_node_get != nullptr &&
              driver.graph_kernel_node_get(from, &kernel) == CUDA_SUCCESS && pack(kernel, place, change.bytes_);
      if (known) return change;
      break;
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      known = known && read(header, Kind::kCopy, &Header::copy, from, driver.graph_copy_node_get);
      break;
    case CU_GRAPH_NODE_TYPE_MEMSET:
      known = known && read(header, Kind::kFill, &Header::fill, from, driver.graph_set_node_get);
      break;
    case CU_GRAPH_NODE_TYPE_HOST:
      known = known && read(header, Kind::kHost, &Header::host, from, driver.graph_host_node_get);
      break;
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      CUgraph child = nullptr;
      known =
          known && driver.graph_child_node_get != nullptr && driver.graph_child_node_get(from, &child) == CUDA_SUCCESS;
      if (!known) break;
      change = of_graph({child, [](CUgraph) {}}, place);  // it is its node's
      change.can_wait_ = false;
      return change;
    }
    default:
      known = false;
  }
  change.bytes_ = bytes_of(header);
  change.can_wait_ = known;
  return change;
}

Change Change::of_switch(std::uint32_t place, bool enabled) {
  Change change;
  Header header;
  header.kind = Kind::kSwitch;
  header.place = place;
  header.enabled = enabled ? 1 : 0;
  change.bytes_ = bytes_of(header);
  return change;
}

Change Change::of_graph(OwnedGraph graph, std::uint32_t place) {
  Change change;
  Header header;
  header.kind = Kind::kGraph;
  header.place = place;
  change.bytes_ = bytes_of(header);
  header.graph = new OwnedGraph(std::move(graph));
  std::memcpy(change.bytes_.data(), &header, sizeof header);
  return change;
}

Change::~Change() {
  Header header;
  if (bytes_.empty()) return;
  std::memcpy(&header, bytes_.data(), sizeof header);
  if (header.kind == Kind::kGraph) delete header.graph;
}

bool Change::has_graph(const std::byte* bytes) noexcept {
  Header header;
  std::memcpy(&header, bytes, sizeof header);
  return header.kind == Kind::kGraph;
}

bool Change::make(std::byte* bytes, const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept {
  const driver::Driver& driver = table();
  Header header;
  std::memcpy(&header, bytes, sizeof header);
  const auto with = [&](auto* set, const auto&... parameters) {
    return set != nullptr && header.place < pieces.handles.size() && pieces.handles[header.place] != nullptr &&
           set(pieces.exec_of(header.place), pieces.handles[header.place], parameters...) == CUDA_SUCCESS;
  };
  switch (header.kind) {
    case Kind::kKernel: {
      auto** const list = reinterpret_cast<void**>(bytes + aligned(sizeof header));
      for (std::uint32_t i = 0; i < header.parameters; ++i) list[i] = bytes + reinterpret_cast<std::uintptr_t>(list[i]);
      header.kernel.kernelParams = header.parameters == 0 ? nullptr : list;
      return with(driver.graph_exec_kernel_set, &header.kernel);
    }
    case Kind::kCopy:
      return with(driver.graph_exec_copy_set, &header.copy, context);
    case Kind::kFill:
      return with(driver.graph_exec_fill_set, &header.fill, context);
    case Kind::kHost:
      return with(driver.graph_exec_host_set, &header.host);
    case Kind::kSwitch:
      return with(driver.graph_exec_enable, header.enabled);
    case Kind::kGraph: {
      const std::unique_ptr<OwnedGraph> graph(header.graph);
      try {
        return take_over(graph->get(), header.place, pieces, priority);
      } catch (const std::exception&) {
        return false;
      }
    }
    case Kind::kLike: {
      CUDA_KERNEL_NODE_PARAMS kernel{};
      return driver.graph_kernel_node_get != nullptr &&
             driver.graph_kernel_node_get(header.like, &kernel) == CUDA_SUCCESS &&
             with(driver.graph_exec_kernel_set, &kernel);
    }
  }
  return false;
}

bool Change::make(const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept {
  std::vector<std::byte> bytes = std::exchange(bytes_, {});
  return !bytes.empty() && make(bytes.data(), pieces, priority, context);
}

}  // namespace cudasched::runtime
