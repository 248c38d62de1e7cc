#include "runtime/slices/change.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <numeric>
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

// To another graph, whole or inside of a child graph.
struct Update {
  OwnedGraph graph;
  ReadGraph read;
};

// The beginning of the bytes. Of a kernel follow the list of parameters, then the values; while the change waits, the
// list has the values' places in the bytes.
struct Header {
  Kind kind = Kind::kLike;
  std::uint32_t place = 0;
  std::uint32_t parameters = 0;
  std::uint32_t bytes = 0;  // with the parts behind the header
  union {
    CUDA_KERNEL_NODE_PARAMS kernel;
    CUDA_MEMCPY3D copy;
    CUDA_MEMSET_NODE_PARAMS fill;
    CUDA_HOST_NODE_PARAMS host;
    unsigned enabled;
    Update* update;
    CUgraphNode like;
  };

  Header() noexcept : like(nullptr) {}
};
static_assert(std::is_trivially_copyable_v<Header>);

constexpr std::size_t aligned(std::size_t bytes) noexcept { return (bytes + 15) & ~std::size_t{15}; }

Header header_of(const std::byte* bytes) noexcept {
  Header header;
  std::memcpy(&header, bytes, sizeof header);
  return header;
}

std::vector<std::byte> bytes_of(Header header) {
  header.bytes = static_cast<std::uint32_t>(aligned(sizeof header));
  std::vector<std::byte> bytes(header.bytes);
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
  header.bytes = static_cast<std::uint32_t>(aligned(block + facts->block_bytes));
  bytes.resize(header.bytes);
  std::memcpy(bytes.data(), &header, sizeof header);
  for (std::size_t i = 0; i < facts->parameters.size(); ++i) {
    const driver::Parameter parameter = facts->parameters[i];
    const std::uint64_t where = block + parameter.offset;
    std::memcpy(bytes.data() + list + i * sizeof where, &where, sizeof where);
    std::memcpy(bytes.data() + where, kernel.kernelParams[i], parameter.bytes);
  }
  return true;
}

// Reads the parameters of `from` into a header of that kind.
template <typename Parameters>
bool read(Header& header, Kind kind, Parameters Header::*into, CUgraphNode from,
          CUresult (*get)(CUgraphNode, Parameters*)) noexcept {
  Parameters parameters{};
  if (get == nullptr || get(from, &parameters) != CUDA_SUCCESS) return false;
  header.kind = kind;
  header.*into = parameters;
  return true;
}

}  // namespace

OwnedGraph GivenBack::own(CUgraph graph, const std::shared_ptr<GivenBack>& to, std::uint32_t of) {
  std::unique_ptr<Place> place(new (std::nothrow) Place{graph, of, nullptr});
  if (place == nullptr) {
    table().cuGraphDestroy(graph);
    throw std::bad_alloc();
  }
  return own(std::move(place), to);
}

OwnedGraph GivenBack::own(std::unique_ptr<Place> place, const std::shared_ptr<GivenBack>& to) {
  Place* const made = place.release();
  return {made->graph, [to, made](CUgraph) { to->add(made); }};  // where it throws, it gives back
}

OwnedGraph GivenBack::take(const std::shared_ptr<GivenBack>& from, std::uint32_t of) {
  std::unique_ptr<Place> found;
  {
    const std::scoped_lock lock(from->lock_);
    for (Place** at = &from->again_; *at != nullptr; at = &(*at)->next) {
      if ((*at)->of != of) continue;
      found.reset(*at);
      *at = found->next;
      break;
    }
  }
  return found == nullptr ? nullptr : own(std::move(found), from);
}

void GivenBack::add(Place* place) noexcept {
  const std::scoped_lock lock(lock_);
  Place*& first = place->of == kOnce ? once_ : again_;
  place->next = std::exchange(first, place);
}

void GivenBack::destroy(Place*& first) noexcept {
  Place* going = nullptr;
  {
    const std::scoped_lock lock(lock_);
    going = std::exchange(first, nullptr);
  }
  while (going != nullptr) {
    const std::unique_ptr<Place> place(std::exchange(going, going->next));
    table().cuGraphDestroy(place->graph);
  }
}

Change Change::of_node(CUgraphNode from, std::uint32_t place) {
  const driver::Driver& driver = table();
  Change change;
  Header header;
  header.place = place;
  header.like = from;
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  bool known = driver.cuGraphNodeGetType(from, &type) == CUDA_SUCCESS;
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      CUDA_KERNEL_NODE_PARAMS kernel{};
      known = known && driver.cuGraphKernelNodeGetParams(from, &kernel) == CUDA_SUCCESS &&
              pack(kernel, place, change.bytes_);
      if (known) return change;
      break;
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      known = known && read(header, Kind::kCopy, &Header::copy, from, driver.cuGraphMemcpyNodeGetParams);
      break;
    case CU_GRAPH_NODE_TYPE_MEMSET:
      known = known && read(header, Kind::kFill, &Header::fill, from, driver.cuGraphMemsetNodeGetParams);
      break;
    case CU_GRAPH_NODE_TYPE_HOST:
      known = known && read(header, Kind::kHost, &Header::host, from, driver.cuGraphHostNodeGetParams);
      break;
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      CUgraph child = nullptr;
      known = known && driver.cuGraphChildGraphNodeGetGraph(from, &child) == CUDA_SUCCESS;
      ReadGraph read;
      if (!known || !read_graph(child, true, read)) break;
      change = of_graph({child, [](CUgraph) {}}, std::move(read), place);  // it is its node's
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

Change Change::of_graph(OwnedGraph graph, ReadGraph read, std::uint32_t place) {
  auto update = std::make_unique<Update>(Update{std::move(graph), std::move(read)});
  Change change;
  Header header;
  header.kind = Kind::kGraph;
  header.place = place;
  header.update = update.get();
  change.bytes_ = bytes_of(header);
  update.release();  // the bytes have it
  return change;
}

Change::~Change() {
  if (!bytes_.empty()) discard(bytes_.data());
}

void Change::discard(const std::byte* bytes) noexcept {
  if (has_graph(bytes)) delete header_of(bytes).update;
}

bool Change::has_graph(const std::byte* bytes) noexcept { return header_of(bytes).kind == Kind::kGraph; }

bool Change::is_awaited(const std::byte* bytes) noexcept {
  const Header header = header_of(bytes);
  return header.kind == Kind::kKernel || (header.kind == Kind::kGraph && !header.update->read.handles.empty());
}

bool Change::make(std::byte* bytes, const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept {
  const driver::Driver& driver = table();
  Header header = header_of(bytes);
  const bool known = header.place < pieces.handles.size() && pieces.handles[header.place] != nullptr;
  // `set_node` changes the slice's graph as `set` changes the executable: needed where a child graph may change.
  const auto with = [&](auto* set, auto* set_node, const auto& parameters, const auto&... of_context) {
    if (!known) return false;
    CUgraphNode const node = pieces.handles[header.place];
    const Pieces::Piece& piece = pieces.pieces[pieces.piece_of[header.place]];
    if (!piece.has_inner || set_node(node, &parameters) != CUDA_SUCCESS) piece.is_ahead = true;
    return set(piece.exec, node, &parameters, of_context...) == CUDA_SUCCESS;
  };
  switch (header.kind) {
    case Kind::kKernel: {
      auto** const list = reinterpret_cast<void**>(bytes + aligned(sizeof header));
      for (std::uint32_t i = 0; i < header.parameters; ++i) list[i] = bytes + reinterpret_cast<std::uintptr_t>(list[i]);
      header.kernel.kernelParams = header.parameters == 0 ? nullptr : list;
      return with(driver.cuGraphExecKernelNodeSetParams, driver.cuGraphKernelNodeSetParams, header.kernel);
    }
    case Kind::kCopy:
      return with(driver.cuGraphExecMemcpyNodeSetParams, driver.cuGraphMemcpyNodeSetParams, header.copy, context);
    case Kind::kFill:
      return with(driver.cuGraphExecMemsetNodeSetParams, driver.cuGraphMemsetNodeSetParams, header.fill, context);
    case Kind::kHost:
      return with(driver.cuGraphExecHostNodeSetParams, driver.cuGraphHostNodeSetParams, header.host);
    case Kind::kSwitch:
      return known && driver.cuGraphNodeSetEnabled(pieces.exec_of(header.place), pieces.handles[header.place],
                                                   header.enabled) == CUDA_SUCCESS;
    case Kind::kGraph: {
      if (header.place != kWhole && !pieces.children) {
        const std::unique_ptr<Update> update(header.update);
        if (known) pieces.pieces[pieces.piece_of[header.place]].is_ahead = true;
        return known &&
               driver.cuGraphExecChildGraphNodeSetParams(pieces.exec_of(header.place), pieces.handles[header.place],
                                                         update->graph.get()) == CUDA_SUCCESS;
      }
      try {
        Awaited awaited;
        awaited.add(bytes, pieces);
        return awaited.make_all(pieces, priority, context);
      } catch (const std::exception&) {
        return false;
      }
    }
    case Kind::kLike: {
      CUDA_KERNEL_NODE_PARAMS kernel{};
      return driver.cuGraphKernelNodeGetParams(header.like, &kernel) == CUDA_SUCCESS &&
             with(driver.cuGraphExecKernelNodeSetParams, driver.cuGraphKernelNodeSetParams, kernel);
    }
  }
  return false;
}

bool Change::make(const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept {
  std::vector<std::byte> bytes = std::exchange(bytes_, {});
  return !bytes.empty() && make(bytes.data(), pieces, priority, context);
}

void Awaited::index(const Pieces& pieces) {
  std::vector<Piece> known(pieces.pieces.size());
  std::vector<std::uint32_t> first(pieces.pieces.size() + 1, 0);
  std::vector<std::uint32_t> places(pieces.piece_of.size());
  for (const std::uint32_t piece : pieces.piece_of) ++first[piece + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<std::uint32_t> next(first.begin(), first.end() - 1);
  for (std::uint32_t place = 0; place < places.size(); ++place) places[next[pieces.piece_of[place]]++] = place;
  first_ = std::move(first);
  places_ = std::move(places);
  pieces_ = std::move(known);
}

void Awaited::Piece::clear() noexcept {
  update = false;
  inside.clear();
  graphs.clear();
  nodes.clear();
  begins.clear();
}

void Awaited::add(const std::byte* bytes, const Pieces& pieces) {
  const Header header = header_of(bytes);
  const std::unique_ptr<Update> update(header.kind == Kind::kGraph ? header.update : nullptr);
  if (pieces_.empty()) index(pieces);
  if (update != nullptr && header.place != Change::kWhole) {
    // Behind a child graph's own node and its beginning.
    return add_inside(std::move(update->graph), update->read, header.place + 2, pieces);
  }
  if (update != nullptr) {
    graph_ = std::move(update->graph);
    read_ = std::move(update->read);
    updates_ = pieces_.size();
    for (Piece& piece : pieces_) {
      piece.clear();
      piece.update = true;
    }
    return;
  }
  Piece& piece = pieces_[pieces.piece_of.at(header.place)];
  const std::size_t begin = piece.nodes.size();
  piece.nodes.resize(begin + header.bytes);
  std::memcpy(piece.nodes.data() + begin, bytes, header.bytes);
  piece.begins.push_back(begin);
}

// A child graph's nodes may be in several slices.
void Awaited::add_inside(OwnedGraph graph, const ReadGraph& read, std::uint32_t first, const Pieces& pieces) {
  for (std::uint32_t i = 0; i < read.handles.size(); ++i) {
    if (read.is_mark(i)) continue;
    Piece& piece = pieces_[pieces.piece_of.at(first + i)];
    if (piece.graphs.empty() || piece.graphs.back() != graph) piece.graphs.push_back(graph);
    piece.inside.push_back({first + i, read.handles[i]});
  }
}

bool Awaited::make(std::uint32_t piece, const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept {
  if (!by(piece)) return true;
  Piece& awaits = pieces_[piece];
  const Pieces::Piece& told = pieces.pieces[piece];
  bool made = true;
  if (awaits.update) {
    made = read_.handles.size() == pieces.handles.size();
    for (std::uint32_t i = first_[piece]; i < first_[piece + 1] && made; ++i) {
      const std::uint32_t place = places_[i];
      made = read_.is_mark(place) || copy_node(pieces.handles[place], read_.handles[place]);
    }
    told.is_ahead = false;
    if (--updates_ == 0) graph_.reset();
  }
  for (const Like& like : awaits.inside) made = made && copy_node(pieces.handles[like.place], like.from);
  // A refresh would undo changes of other nodes that the executable alone has.
  const bool refreshes = awaits.update || !awaits.inside.empty();
  made = made && (!refreshes || (!told.is_ahead && refresh(told, priority)));
  for (const std::size_t begin : awaits.begins) {
    made = made && Change::make(awaits.nodes.data() + begin, pieces, priority, context);
  }
  awaits.clear();
  return made;
}

bool Awaited::make_all(const Pieces& pieces, std::optional<int> priority, CUcontext context) noexcept {
  bool made = true;
  for (std::uint32_t piece = 0; piece < pieces_.size(); ++piece) {
    made = make(piece, pieces, priority, context) && made;
  }
  return made;
}

void Awaited::clear() noexcept {
  pieces_.clear();
  graph_.reset();
  updates_ = 0;
}

}  // namespace cudasched::runtime
