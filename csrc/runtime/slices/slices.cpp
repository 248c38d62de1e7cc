#include "runtime/slices/slices.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <exception>
#include <new>
#include <utility>

#include "driver/driver.hpp"

namespace cudasched::runtime {
namespace {

using driver::table;
using graph::WholeReason;

constexpr unsigned long long kKnownFlags = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
                                           CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD | kUseNodePriority |
                                           CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH;
constexpr std::int64_t kMostTakeNs = kNsPerMs;
constexpr std::uint64_t kMostUntried = 10'000;  // launches

// May the reason pass? Then slices are tried again when the graph has been launched as often again, or kMostUntried
// times.
bool is_for_now(WholeReason reason) noexcept {
  return reason == WholeReason::kNoMemory || reason == WholeReason::kTooSlow || reason == WholeReason::kOverBudget ||
         reason == WholeReason::kRefused;
}

// A fault, rather than a property of the graph.
bool is_failure(WholeReason reason) noexcept {
  using enum WholeReason;
  static constexpr std::array kFailures{kNotCloned, kCloneDiffers, kNotBuilt, kNoMemory, kTooSlow, kRefused};
  return std::ranges::find(kFailures, reason) != kFailures.end();
}

}  // namespace

Slices::Driving::Driving(Slices& slices) noexcept : slices_(slices) {
  slices_.waiting_to_drive_.fetch_add(1);
  slices_.driving_.lock();
  slices_.waiting_to_drive_.fetch_sub(1);
}

Slices::Driving::~Driving() { slices_.driving_.unlock(); }

Slices::Unloading::Unloading(Slices& slices, bool (*submit_queued)() noexcept) noexcept {
  slices.unloading_.fetch_add(1);
  driving_.emplace(slices);
  std::vector<AwaitingGraph> untold = slices.find_untold();
  while (!slices.tell_each(untold)) {
    // The program waits for the launch, as for all that was queued before.
    driving_.reset();
    submit_queued();
    driving_.emplace(slices);
  }
  slices.unloading_.fetch_sub(1);
  slices.unloads_.fetch_add(1);
}
Slices::Unloading::~Unloading() = default;

// driving_ is held. Slices that await changes may have kernels that are about to go, where the graph has other kernels
// now; or an awaited change may name such kernels.
std::vector<Slices::AwaitingGraph> Slices::find_untold() noexcept {
  std::vector<AwaitingGraph> untold;
  try {
    const std::scoped_lock lock(mutex_);
    untold.reserve(all_.size());
    for (const auto& [exec, sliced] : all_) {
      if (sliced->may_await.load()) untold.push_back({sliced, sliced->told.load()});
    }
  } catch (const std::exception&) {
  }
  return untold;
}

// driving_ is held. False: the launcher thread has one at the gate; it tells it when that launch is submitted.
bool Slices::tell_each(std::vector<AwaitingGraph>& untold) noexcept {
  const driver::RelaxedCapture relaxed;
  const std::int64_t end_ns = now_ns() + kMostTakeNs;
  std::erase_if(untold, [&](const AwaitingGraph& each) {
    Sliced& sliced = *each.sliced;
    bool taken = false;
    while (sliced.told.load() == each.told && !(taken = sliced.take())) {
      if (stopping_.load()) {  // no thread may submit it any more
        const std::scoped_lock turn(sliced.turn);
        sliced.broken = true;
        return true;
      }
      if (now_ns() > end_ns) return false;
      sched_yield();
    }
    if (!taken) return true;  // the launcher has told it
    if (sliced.told.load() == each.told) tell_all(sliced);
    sliced.release();
    return true;
  });
  return untold.empty();
}

// It is taken.
void Slices::tell_all(Sliced& sliced) noexcept {
  const driver::CurrentContext current(sliced.context);
  sliced.may_await.store(false);
  const bool made =
      sliced.pieces == nullptr || sliced.awaited.make_all(*sliced.pieces, sliced.priority, sliced.context);
  sliced.told.fetch_add(1);
  if (made) return;
  const std::scoped_lock turn(sliced.turn);
  sliced.broken = true;
}

void Slices::configure(const SliceSettings& settings) noexcept {
  const Driving driving(*this);
  settings_ = settings;
  children_stay_.store(false);
}

// ---- the program's threads -----------------------------------------------------------------------------------------

std::shared_ptr<Sliced> Slices::find(CUgraphExec exec) noexcept {
  const std::scoped_lock lock(mutex_);
  const auto found = all_.find(exec);
  return found == all_.end() ? nullptr : found->second;
}

// The reason, as far as known without asking the driver.
WholeReason Slices::why_not_cloned(const Sliced& sliced, driver::ExecFacts& facts) const noexcept {
  if (!driver::registry().find(sliced.exec, facts)) return WholeReason::kNoMemory;
  if ((sliced.flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) != 0) return WholeReason::kDeviceLaunch;
  if ((sliced.flags & ~kKnownFlags) != 0) return WholeReason::kUnknownNode;
  if (sliced.context == nullptr) return WholeReason::kGreenContext;
  if (!facts.plain) return WholeReason::kNone;  // the nodes say more
  if (facts.nodes <= 1) return WholeReason::kOneNode;
  // Predictions of graphs that never ran may be wrong by much.
  if (facts.critical_path_ns < settings_.slice_ns / 4) return WholeReason::kShort;
  return WholeReason::kNone;
}

// driving_ is held: another thread may destroy an earlier clone of this graph.
WholeReason Slices::clone(Sliced& sliced, CUgraph graph, const driver::ExecFacts& facts) {
  // Of a plain graph, the builder makes the remaining checks.
  if (!facts.plain) {
    const WholeReason why = why_whole(graph);
    return why == WholeReason::kNone ? WholeReason::kUnknownNode : why;
  }
  CUgraph made = nullptr;
  if (table().cuGraphClone(&made, graph) != CUDA_SUCCESS) return WholeReason::kNotCloned;
  sliced.clone = GivenBack::own(made, sliced.given_back);
  sliced.identity = facts.identity;
  return WholeReason::kNone;
}

void Slices::made(CUgraphExec exec, CUgraph graph, unsigned long long flags, std::optional<int> priority,
                  const GraphTimes& times) noexcept {
  if (!on() || exec == nullptr) return;
  const driver::RelaxedCapture relaxed;
  try {
    auto sliced = std::make_shared<Sliced>();
    sliced->exec = exec;
    sliced->context = driver::shareable_context();
    sliced->flags = flags;
    sliced->priority = priority;
    sliced->times = times;
    driver::ExecFacts facts;
    WholeReason why = why_not_cloned(*sliced, facts);
    if (why == WholeReason::kNone) {
      const Driving driving(*this);
      why = clone(*sliced, graph, facts);
      if (why == WholeReason::kNone &&
          (!get_nodes(graph, sliced->program_nodes) || !get_nodes(sliced->clone.get(), sliced->clone_nodes) ||
           !are_paired(sliced->program_nodes, sliced->clone_nodes, sliced->clone.get()))) {
        why = WholeReason::kCloneDiffers;
      }
      if (why == WholeReason::kNone && !driver::registry().has_slices(exec, sliced.get())) why = WholeReason::kNoMemory;
      if (why != WholeReason::kNone) {
        sliced->clone.reset();
        sliced->given_back->destroy();
      }
    }
    if (why != WholeReason::kNone) note_whole(*sliced, why);
    const std::scoped_lock lock(mutex_);
    all_.insert_or_assign(exec, std::move(sliced));
  } catch (const std::exception&) {
    driver::registry().has_slices(exec, nullptr);  // no memory: whole
  }
}

bool Slices::follow(CUgraphExec exec) noexcept {
  auto* const sliced = static_cast<Sliced*>(driver::registry().slices(exec));
  if (sliced == nullptr) return false;
  const std::scoped_lock turn(sliced->turn);
  if (sliced->goes_whole || sliced->broken || sliced->was_refused || !sliced->ordered.load(std::memory_order_relaxed) ||
      sliced->state.load() != Sliced::State::kReady) {
    return false;
  }
  ++sliced->following;
  return true;
}

void Slices::followed(CUgraphExec exec) noexcept {
  auto* const sliced = static_cast<Sliced*>(driver::registry().slices(exec));
  if (sliced == nullptr) return;
  const std::scoped_lock turn(sliced->turn);
  --sliced->following;
}

// prepare(sliced, told) changes our clone and fills in `told` for the slices. The ring may make a thread wait for the
// gate, so nothing is held there.
template <typename Prepare>
void Slices::tell(CUgraphExec exec, UpdateQueue* behind, Prepare&& prepare) noexcept {
  const std::shared_ptr<Sliced> sliced = on() ? find(exec) : nullptr;
  if (sliced == nullptr) return;
  const driver::RelaxedCapture relaxed;
  SliceUpdate told;
  bool may_wait = false;
  {
    const Driving driving(*this);
    try {
      prepare(*sliced, told);
      may_wait =
          told.fits && told.change.can_wait() && !told.change.bytes().empty() && sliced->proven.contains(told.of);
    } catch (const std::exception&) {
      told.fits = false;
    }
  }
  const bool waits = behind != nullptr && may_wait && behind->push(exec, sliced->context, told.change.bytes());
  if (waits) told.change.release();
  if (behind != nullptr && !waits) {
    behind->drain();
    followed(exec);
  }
  const Driving driving(*this);
  try {
    if (!waits) told.fits = told.fits && change_pieces(*sliced, told);
  } catch (const std::exception&) {
    told.fits = false;
  }
  if (!told.fits) did_not_follow(*sliced, told);
  if (sliced->clone_nodes.empty()) {
    sliced->given_back->destroy_all();  // no change of a child graph is followed any more
  } else {
    sliced->given_back->destroy();
  }
}

// driving_ is held.
bool Slices::change_pieces(Sliced& sliced, SliceUpdate& told) {
  if (sliced.pieces == nullptr || told.change.bytes().empty()) return true;
  {
    const Taken taken(sliced);
    if (told.of == Sliced::kGraph) sliced.awaited.clear();  // of the graph before the update
    if (!sliced.awaited.make_all(*sliced.pieces, sliced.priority, sliced.context) ||
        !told.change.make(*sliced.pieces, sliced.priority, sliced.context)) {
      return false;
    }
  }
  sliced.proven.insert(told.of);
  return true;
}

// driving_ is held. After an update, our clone is equal to the graph; after any other change the clone may differ.
void Slices::did_not_follow(Sliced& sliced, const SliceUpdate& told) noexcept {
  if (told.of != Sliced::kGraph) return give_up(sliced);
  WholeReason why = told.why;
  if (why == WholeReason::kNone && ++sliced.misfits >= kMostMisfits) why = WholeReason::kUpdated;
  sliced.generation.fetch_add(1);
  drop(sliced);
  sliced.least_launches.store(sliced.launches.load(std::memory_order_relaxed) + kSettled, std::memory_order_relaxed);
  if (why == WholeReason::kNone) return;
  sliced.clone.reset();
  note_whole(sliced, why);
  sliced.least_launches.store(~std::uint64_t{0}, std::memory_order_relaxed);  // there is nothing to build from
}

// To another graph of the same nodes and edges, as the driver has verified.
void Slices::updated(CUgraphExec exec, CUgraph graph, UpdateQueue* behind) noexcept {
  tell(exec, behind, [&](Sliced& sliced, SliceUpdate& told) { prepare_update(sliced, graph, told); });
}

// driving_ is held.
void Slices::prepare_update(Sliced& sliced, CUgraph graph, SliceUpdate& told) {
  if (sliced.misfits >= kMostMisfits) {
    told.fits = sliced.pieces == nullptr;
    return;
  }
  const std::uint64_t launches = sliced.launches.load(std::memory_order_relaxed);
  const Sliced::State state = sliced.state.load();
  if (sliced.has_refused_slices()) drop(sliced);
  const bool has_pieces = sliced.pieces != nullptr;
  const bool often = sliced.changed_at && launches - *sliced.changed_at < kSettled;
  sliced.changed_at = launches;
  sliced.updated = true;
  sliced.clone.reset();
  sliced.clone_nodes.clear();
  sliced.changed_meanwhile.clear();
  if (driver::registry().graphs_hold_objects()) return told.leave_objects_to_driver();
  // Of a graph that changes at nearly each launch, a clone is of use only where slices are wanted.
  if (!has_pieces && state != Sliced::State::kWanted && state != Sliced::State::kBuilding && !sliced.wants_clone &&
      often) {
    return;
  }
  driver::ExecFacts facts;
  told.why = why_not_cloned(sliced, facts);
  if (told.why == WholeReason::kNone) told.why = clone(sliced, graph, facts);
  if (told.why == WholeReason::kNone && !driver::registry().has_slices(sliced.exec, &sliced)) {
    told.why = WholeReason::kNoMemory;
  }
  told.fits = told.why == WholeReason::kNone;
  if (told.fits && (has_pieces || state == Sliced::State::kBuilding)) {
    ReadGraph now;
    told.fits = read_graph(sliced.clone.get(), sliced.shape.children, now) && is_alike(sliced.shape, now);
    if (told.fits && has_pieces) told.change = Change::of_graph(sliced.clone, std::move(now));
    if (told.fits && state == Sliced::State::kBuilding) sliced.updated_meanwhile = true;
  }
  if (told.fits && state == Sliced::State::kWhole) {
    sliced.least_launches.store(0, std::memory_order_relaxed);
    sliced.state.store(Sliced::State::kIdle);
  }
}

bool Slices::find_number(Sliced& sliced, CUgraphNode node, std::uint32_t& number) {
  // Which of its nodes the driver has paired with which, it does not say.
  if (sliced.updated || sliced.clone == nullptr) return false;
  if (sliced.number_of.empty()) {
    for (std::uint32_t i = 0; i < sliced.program_nodes.size(); ++i)
      sliced.number_of.emplace(sliced.program_nodes[i], i);
  }
  const auto found = sliced.number_of.find(node);
  if (found == sliced.number_of.end()) return false;
  number = found->second;
  return number < sliced.clone_nodes.size() && (sliced.pieces == nullptr || number < sliced.places.size());
}

void Slices::node_changed(CUgraphExec exec, CUgraphNode node, CUcontext context, const Set& set,
                          UpdateQueue* behind) noexcept {
  tell(exec, behind, [&](Sliced& sliced, SliceUpdate& told) {
    if (sliced.clone == nullptr) return;
    told.of = 0;
    told.fits = (context == nullptr || context == sliced.context) && find_number(sliced, node, told.of) &&
                set(sliced.clone_nodes[told.of]) == CUDA_SUCCESS;
    if (!told.fits) return;
    if (sliced.state.load() == Sliced::State::kBuilding) sliced.changed_meanwhile.insert(told.of);
    if (sliced.pieces != nullptr) {
      told.change = Change::of_node(sliced.clone_nodes[told.of], sliced.places[told.of]);
    }
  });
}

void Slices::child_changed(CUgraphExec exec, CUgraphNode node, CUgraph child, UpdateQueue* behind) noexcept {
  tell(exec, behind, [&](Sliced& sliced, SliceUpdate& told) {
    if (sliced.clone == nullptr) return;
    if (driver::registry().graphs_hold_objects()) return told.leave_objects_to_driver();
    told.of = 0;
    CUgraph ours = nullptr;
    ReadGraph to;
    ReadGraph from;
    told.fits = find_number(sliced, node, told.of) &&
                table().cuGraphChildGraphNodeGetGraph(sliced.clone_nodes[told.of], &ours) == CUDA_SUCCESS &&
                read_graph(ours, true, to) && read_graph(child, true, from) && copy_nodes(to, from);
    if (!told.fits) return;
    if (sliced.state.load() == Sliced::State::kBuilding) sliced.changed_meanwhile.insert(told.of);
    if (sliced.pieces == nullptr) return;
    // Slices get a copy, because our graph may have changed again by then.
    OwnedGraph copy = GivenBack::take(sliced.given_back, told.of);
    const bool is_new = copy == nullptr;
    if (CUgraph made = nullptr; is_new && table().cuGraphClone(&made, ours) == CUDA_SUCCESS) {
      copy = GivenBack::own(made, sliced.given_back, told.of);
    }
    ReadGraph read;
    told.fits =
        copy != nullptr && read_graph(copy.get(), true, read) && (is_new ? is_alike(read, to) : copy_nodes(read, to));
    if (!told.fits) return;
    if (!sliced.pieces->children) read = {};
    told.change = Change::of_graph(std::move(copy), std::move(read), sliced.places[told.of]);
  });
}

void Slices::node_enabled(CUgraphExec exec, CUgraphNode node, bool enabled, UpdateQueue* behind) noexcept {
  tell(exec, behind, [&](Sliced& sliced, SliceUpdate& told) {
    told.of = Sliced::kSwitch;
    std::uint32_t number = 0;
    if (!find_number(sliced, node, number)) {
      // It outlives updates, and the next one would bring slices back that do not know of it.
      sliced.misfits = kMostMisfits;
      // One that was taken for short has a clone, too, and is cut when it turns out to be long.
      told.fits = sliced.clone == nullptr && sliced.state.load() == Sliced::State::kWhole;
      return;
    }
    if (enabled) {
      sliced.disabled.erase(number);
    } else {
      sliced.disabled.insert(number);
    }
    if (sliced.pieces != nullptr) told.change = Change::of_switch(sliced.places[number], enabled);
  });
}

// The clone differs from the graph. driving_ is held.
void Slices::give_up(Sliced& sliced) noexcept {
  sliced.generation.fetch_add(1);
  drop(sliced);
  sliced.clone.reset();
  sliced.clone_nodes.clear();
  note_whole(sliced, WholeReason::kUpdated);
}

void Slices::forget(CUgraphExec exec) noexcept {
  if (!on()) return;
  const auto known = [&] {
    const std::scoped_lock lock(mutex_);
    return all_.extract(exec);
  }();
  if (known.empty()) return;
  const driver::RelaxedCapture relaxed;
  const Driving driving(*this);
  end(*known.mapped());
}

void Slices::context_ends(CUcontext context) noexcept {
  if (!on()) return;
  const driver::RelaxedCapture relaxed;
  const Driving driving(*this);
  const std::scoped_lock lock(mutex_);
  std::erase_if(all_, [&](const auto& known) {
    Sliced& sliced = *known.second;
    if (context != nullptr && sliced.context != context) return false;
    driver::registry().has_slices(sliced.exec, nullptr);
    end(sliced);
    return true;
  });
  std::erase_if(upload_streams_, [&](const auto& known) {
    if (context != nullptr && known.first != context) return false;
    if (known.second != nullptr) table().cuStreamDestroy(known.second);
    return true;
  });
}

// driving_ is held.
void Slices::end(Sliced& sliced) noexcept {
  sliced.generation.fetch_add(1);
  drop(sliced);
  sliced.clone.reset();
  sliced.given_back->destroy_all();
  const Taken taken(sliced);
  if (sliced.event != nullptr) table().cuEventDestroy(std::exchange(sliced.event, nullptr));
  sliced.last = {};
}

// driving_ is held, and the graph is taken.
std::unique_ptr<Pieces> Slices::take_pieces(Sliced& sliced, Sliced::State now) noexcept {
  bytes_.fetch_sub(std::exchange(sliced.bytes, 0), std::memory_order_relaxed);
  sliced.slices.store(0, std::memory_order_relaxed);
  sliced.proven.clear();
  {
    const std::scoped_lock turn(sliced.turn);
    sliced.broken = false;
    sliced.state.store(now);
  }
  if (sliced.pieces != nullptr) dropped_.fetch_add(1, std::memory_order_relaxed);
  sliced.awaited.clear();
  return std::move(sliced.pieces);
}

// driving_ is held.
void Slices::drop(Sliced& sliced) noexcept {
  std::unique_ptr<Pieces> pieces;
  const Taken taken(sliced);
  pieces = take_pieces(sliced, Sliced::State::kIdle);
}

void Slices::note_whole(Sliced& sliced, WholeReason reason) noexcept {
  if (is_for_now(reason)) {
    const std::uint64_t launches = sliced.launches.load(std::memory_order_relaxed);
    sliced.least_launches.store(launches + std::min(launches, kMostUntried) + kSettled, std::memory_order_relaxed);
  }
  sliced.reason.store(reason, std::memory_order_relaxed);
  sliced.state.store(Sliced::State::kWhole);
  const std::uint32_t bit = std::uint32_t{1} << static_cast<unsigned>(reason);
  const bool is_new = (sliced.whole_for.fetch_or(bit, std::memory_order_relaxed) & bit) == 0;
  if (driver::ExecFacts facts; is_new && driver::registry().find(sliced.exec, facts)) {
    const std::scoped_lock lock(ever_lock_);
    ever_[static_cast<std::size_t>(reason)].add(facts);
  }
  // The ticker says so: this may be the launcher thread.
  WholeReason none = WholeReason::kNone;
  if (is_failure(reason)) failed_.compare_exchange_strong(none, reason);
}

// ---- launches ------------------------------------------------------------------------------------------------------

bool Slices::is_last(const Sliced& sliced, CUstream stream, CUcontext context) const noexcept {
  const Sliced::Last& last = sliced.last;
  return last.stream == stream && stream != CU_STREAM_PER_THREAD && last.context == context &&
         last.epoch == streams_ended_.load(std::memory_order_relaxed);
}

void Slices::note_last(Sliced& sliced, CUstream stream, CUcontext context, bool ordered) noexcept {
  sliced.last = {stream, context, streams_ended_.load(std::memory_order_relaxed), ordered};
  sliced.ordered.store(ordered, std::memory_order_relaxed);
}

void Slices::order(Sliced& sliced, CUstream stream, CUcontext context) noexcept {
  if (!sliced.last.ordered || is_last(sliced, stream, context)) return;
  if (table().cuStreamWaitEvent(stream, sliced.event, CU_EVENT_WAIT_DEFAULT) != CUDA_SUCCESS) {
    table().cuEventSynchronize(sliced.event);
  }
}

void Slices::before_direct(CUgraphExec exec, CUstream stream) noexcept {
  auto* const sliced = static_cast<Sliced*>(driver::registry().slices(exec));
  if (sliced == nullptr) return;
  const driver::RelaxedCapture relaxed;
  const Taken taken(*sliced);
  order(*sliced, stream, driver::shareable_context());
}

void Slices::after_direct(CUgraphExec exec, CUstream stream) noexcept {
  auto* const sliced = static_cast<Sliced*>(driver::registry().slices(exec));
  if (sliced == nullptr) return;
  sliced->launches.fetch_add(1, std::memory_order_relaxed);
  sliced->launched_epoch.store(unloads_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  CUcontext const context = driver::shareable_context();
  const Taken taken(*sliced);
  note_last(*sliced, stream, context, false);
}

Slices::Launch Slices::begin(CUgraphExec exec, CUstream stream, CUcontext context, bool beside_latency) noexcept {
  auto* const sliced = static_cast<Sliced*>(driver::registry().slices(exec));
  if (sliced == nullptr) return {};
  while (!sliced->take()) sched_yield();  // for a moment: no other thread keeps it
  const std::uint64_t launches = sliced->launches.fetch_add(1, std::memory_order_relaxed) + 1;
  sliced->launched_epoch.store(unloads_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  const bool wants = settings_.when == SliceSettings::When::kAlways || beside_latency;
  const bool builds = settings_.when == SliceSettings::When::kAhead || wants;
  Launch launch{.sliced = sliced};
  {
    const std::scoped_lock turn(sliced->turn);
    const Sliced::State state = sliced->state.load(std::memory_order_relaxed);
    const bool settled = launches >= sliced->least_launches.load(std::memory_order_relaxed);
    const bool again = state == Sliced::State::kWhole && is_for_now(sliced->reason.load(std::memory_order_relaxed)) &&
                       sliced->slices.load(std::memory_order_relaxed) == 0;
    Sliced::State before = state;
    if (builds && settled && (state == Sliced::State::kIdle || again) &&
        sliced->state.compare_exchange_strong(before, Sliced::State::kWanted)) {
      wanted_.store(true);
    }
    const bool is_followed = sliced->following > 0;  // the whole graph already has the changes
    const bool fits = sliced->pieces != nullptr && state != Sliced::State::kWhole && !sliced->broken;
    if (fits && (is_followed || (wants && context == sliced->context))) {
      launch.orders = true;
      if (is_followed || sliced->last.ordered || is_last(*sliced, stream, context)) {
        launch.parts = static_cast<std::uint32_t>(sliced->pieces->pieces.size());
        sliced->was_sliced.store(true, std::memory_order_relaxed);
      }
    }
    launch.is_lost = is_followed && launch.parts == 0;
    sliced->goes_whole = launch.parts == 0;
  }
  order(*sliced, stream, context);
  return launch;
}

// While the GPU is at the work submitted before, or soon will be.
CUgraphExec Slices::part(const Launch& launch, std::uint32_t index, bool may_upload) noexcept {
  Sliced& sliced = *launch.sliced;
  if (sliced.awaited.by(index)) {
    const driver::RelaxedCapture relaxed;
    const driver::CurrentContext current(sliced.context);
    const std::scoped_lock reading(reading_);
    if (!sliced.awaited.make(index, *sliced.pieces, sliced.priority, sliced.context)) {
      const std::scoped_lock turn(sliced.turn);
      sliced.broken = true;
      return nullptr;
    }
    // Now, beside the slice before: the launch would do it behind that one. Where this fails, the launch says so.
    if (may_upload && sliced.upload != nullptr) {
      table().cuGraphUpload(sliced.pieces->pieces[index].exec, sliced.upload);
    }
  }
  return sliced.pieces->pieces[index].exec;
}

bool Slices::may_go_whole(const Launch& launch) noexcept {
  if (launch.sliced == nullptr || launch.parts == 0) return !launch.is_lost;
  const std::scoped_lock turn(launch.sliced->turn);
  launch.sliced->goes_whole = launch.sliced->following == 0;
  return launch.sliced->goes_whole;
}

void Slices::end(const Launch& launch, CUstream stream, CUcontext context, CUresult status, bool refused) noexcept {
  if (launch.sliced == nullptr) return;
  Sliced& sliced = *launch.sliced;
  if (unloading_.load() > 0 && sliced.may_await.load()) {
    const std::scoped_lock reading(reading_);
    tell_all(sliced);
  }
  // Behind the submitted parts, where the launch failed midway.
  const bool ran = status == CUDA_SUCCESS || launch.parts > 0;
  const bool ordered = launch.orders && ran && table().cuEventRecord(sliced.event, stream) == CUDA_SUCCESS;
  if (ran) note_last(sliced, stream, context, ordered);
  bool is_followed = false;
  bool went_whole = false;
  {
    const std::scoped_lock turn(sliced.turn);
    is_followed = sliced.following > 0;
    went_whole = std::exchange(sliced.goes_whole, false);
    if (refused && went_whole) sliced.state.store(Sliced::State::kWhole);  // no change follows it from now on
    sliced.was_refused = refused && !went_whole;
  }
  // The next one goes in slices whatever its stream.
  if (is_followed && ran && !ordered) table().cuStreamSynchronize.legacy(stream);
  if (refused && went_whole) {
    note_whole(sliced, WholeReason::kRefused);
    wanted_.store(true);  // the builder takes its slices away
  }
  sliced.release();
}

void Slices::make_change(CUgraphExec exec, std::byte* change) noexcept {
  auto* const sliced = static_cast<Sliced*>(driver::registry().slices(exec));
  if (sliced == nullptr) return Change::discard(change);
  bool made = false;
  try {
    const bool is_awaited = Change::is_awaited(change);
    std::optional<Driving> driving;
    if (!is_awaited && Change::has_graph(change)) driving.emplace(*this);
    const Taken taken(*sliced);
    if (sliced->pieces == nullptr) {
      Change::discard(change);
    } else if (is_awaited) {
      sliced->may_await.store(true);
      sliced->awaited.add(change, *sliced->pieces);
      made = true;
    } else {
      const driver::CurrentContext current(sliced->context);
      const std::scoped_lock reading(reading_);
      const bool kept_up = sliced->awaited.make_all(*sliced->pieces, sliced->priority, sliced->context);
      made = Change::make(change, *sliced->pieces, sliced->priority, sliced->context) && kept_up;
    }
  } catch (const std::exception&) {  // no memory
  }
  const std::scoped_lock turn(sliced->turn);
  --sliced->following;
  sliced->broken = sliced->broken || !made;
}

// ---- counts --------------------------------------------------------------------------------------------------------

SliceCounts Slices::counts() noexcept {
  SliceCounts counts;
  counts.bytes = bytes_.load(std::memory_order_relaxed);
  counts.builds = builds_.load(std::memory_order_relaxed);
  counts.build_ns = build_ns_.load(std::memory_order_relaxed);
  counts.dropped = dropped_.load(std::memory_order_relaxed);
  const std::scoped_lock lock(mutex_);
  for (const auto& [exec, sliced] : all_) {
    const Sliced::State state = sliced->state.load();
    const std::uint32_t slices = sliced->slices.load(std::memory_order_relaxed);
    if (state == Sliced::State::kWhole) {
      WholeGraphs& whole = counts.whole[static_cast<std::size_t>(sliced->reason.load(std::memory_order_relaxed))];
      driver::ExecFacts facts;
      driver::registry().find(exec, facts);  // else none
      whole.add(facts);
    } else if (slices != 0) {
      ++counts.graphs_sliced;
      counts.slices += slices;
    }
  }
  return counts;
}

std::array<WholeGraphs, graph::kWholeReasons> Slices::whole_ever() noexcept {
  const std::scoped_lock lock(ever_lock_);
  return ever_;
}

std::array<WholeGraphs, graph::kWholeReasons> Slices::whole_lately() noexcept {
  const std::scoped_lock lock(lately_mutex_);
  if (const std::int64_t now = now_ns(); lately_ns_ == 0 || now - lately_ns_ > kLatelyNs) {
    lately_ = counts().whole;
    lately_ns_ = now;
  }
  return lately_;
}

void Slices::reset_in_child() noexcept {
  // The parent's state stays the parent's.
  const SliceSettings settings = settings_;
  new (this) Slices;
  settings_ = settings;
}

}  // namespace cudasched::runtime
