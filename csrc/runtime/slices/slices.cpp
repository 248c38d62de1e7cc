#include "runtime/slices/slices.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <exception>
#include <new>
#include <thread>
#include <utility>

#include "base/hash.hpp"
#include "base/log.hpp"
#include "driver/driver.hpp"
#include "driver/node_priorities.hpp"

namespace cudasched::runtime {
namespace {

using driver::table;
using graph::WholeReason;

constexpr unsigned long long kUseNodePriority = CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
constexpr unsigned long long kKnownFlags = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
                                           CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD | kUseNodePriority |
                                           CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH;
constexpr std::int64_t kPollNs = 200 * kNsPerUs;
constexpr std::int64_t kMostUnloadWaitNs = 100'000 * kNsPerUs;

void sleep_ns(std::int64_t ns) noexcept {
  const timespec time{ns / kNsPerSecond, ns % kNsPerSecond};
  nanosleep(&time, nullptr);
}

// Taken for the length of a scope. The launcher may have it for as long as the gate holds a launch, but what is queued
// was drained before a graph is changed.
class Taken {
 public:
  explicit Taken(Sliced& sliced) noexcept : sliced_(sliced) {
    while (!sliced_.take()) sched_yield();
  }
  ~Taken() { sliced_.release(); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

 private:
  Sliced& sliced_;
};

bool can_cut() noexcept {
  const driver::Driver& driver = table();
  return driver.graph_clone != nullptr && driver.graph_clone_destroy != nullptr &&
         driver.graph_node_destroy != nullptr && driver.graph_instantiate != nullptr &&
         driver.graph_get_nodes != nullptr && driver.graph_get_edges != nullptr &&
         driver.graph_node_get_type != nullptr && driver.stream_wait_event != nullptr;
}

bool is_followed(Sliced& sliced) noexcept {
  const std::scoped_lock turn(sliced.turn);
  return sliced.following > 0;
}

bool is_broken(Sliced& sliced) noexcept {
  const std::scoped_lock turn(sliced.turn);
  return sliced.broken;
}

// No change is queued for its slices, or will be: from now on its state is `now`.
bool stop_following(Sliced& sliced, Sliced::State now) noexcept {
  const std::scoped_lock turn(sliced.turn);
  if (sliced.following > 0) return false;
  sliced.state.store(now);
  return true;
}

// Of no use any more.
bool has_refused_slices(const Sliced& sliced) noexcept {
  return sliced.state.load() == Sliced::State::kWhole && sliced.slices.load(std::memory_order_relaxed) != 0;
}

// A fault, rather than what the graph is.
bool is_failure(WholeReason reason) noexcept {
  switch (reason) {
    case WholeReason::kNotCloned:
    case WholeReason::kCloneDiffers:
    case WholeReason::kNotBuilt:
    case WholeReason::kNoMemory:
    case WholeReason::kTooSlow:
    case WholeReason::kRefused:
      return true;
    default:
      return false;
  }
}

}  // namespace

Slices::Driving::Driving(Slices& slices) noexcept : slices_(slices) {
  slices_.waiting_to_drive_.fetch_add(1);
  slices_.driving_.lock();
  slices_.waiting_to_drive_.fetch_sub(1);
}

Slices::Driving::~Driving() { slices_.driving_.unlock(); }

Slices::Unloading::Unloading(Slices& slices) noexcept : driving_(slices) {
  slices.unloads_.fetch_add(1);
  slices.tell_what_waits();
}
Slices::Unloading::~Unloading() = default;

// driving_ is held, and what was queued has been submitted. Slices may have kernels that are about to be gone, where
// what they have not been told is that the graph has others now; or what they have not been told names such kernels.
void Slices::tell_what_waits() noexcept {
  std::vector<std::shared_ptr<Sliced>> told;
  try {
    const std::scoped_lock lock(mutex_);
    for (const auto& [exec, sliced] : all_) {
      if (sliced->may_await.exchange(false)) told.push_back(sliced);
    }
  } catch (const std::exception&) {
    return;
  }
  const driver::RelaxedCapture relaxed;
  for (const std::shared_ptr<Sliced>& sliced : told) {
    bool made = false;
    // A launch that another thread has made since may be at a closed gate.
    const std::int64_t end_ns = now_ns() + kMostUnloadWaitNs;
    bool taken = sliced->take();
    while (!taken && now_ns() < end_ns) {
      sched_yield();
      taken = sliced->take();
    }
    if (taken) {
      const driver::CurrentContext current(sliced->context);
      made = sliced->pieces == nullptr || sliced->awaited.make_all(*sliced->pieces, sliced->priority, sliced->context);
      sliced->release();
    }
    if (made) continue;
    const std::scoped_lock turn(sliced->turn);
    sliced->broken = true;
  }
}

void Slices::configure(const SliceSettings& settings) noexcept {
  const Driving driving(*this);
  settings_ = settings;
  children_stay_.store(false);
}

// ---- the program's threads
// -------------------------------------------------------------------------------------------

std::shared_ptr<Sliced> Slices::find(CUgraphExec exec) noexcept {
  const std::scoped_lock lock(mutex_);
  const auto found = all_.find(exec);
  return found == all_.end() ? nullptr : found->second;
}

WholeReason Slices::clone(Sliced& sliced, CUgraph graph) {
  driver::ExecFacts facts;
  if (!driver::registry().find(sliced.exec, facts)) return WholeReason::kNoMemory;
  if ((sliced.flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) != 0) return WholeReason::kDeviceLaunch;
  if ((sliced.flags & ~kKnownFlags) != 0) return WholeReason::kUnknownNode;
  if (sliced.context == nullptr) return WholeReason::kGreenContext;
  // Of a plain graph, the builder looks at what is left to be looked at.
  if (!facts.plain) {
    const WholeReason why = why_whole(graph);
    return why == WholeReason::kNone ? WholeReason::kUnknownNode : why;
  }
  if (facts.nodes <= 1) return WholeReason::kOneNode;
  // What is predicted of graphs that never ran may be wrong by much.
  if (facts.critical_path_ns < settings_.slice_ns / 4) return WholeReason::kShort;
  CUgraph made = nullptr;
  if (table().graph_clone(&made, graph) != CUDA_SUCCESS) return WholeReason::kNotCloned;
  sliced.clone = own(made);
  sliced.identity = facts.identity;
  return WholeReason::kNone;
}

void Slices::made(CUgraphExec exec, CUgraph graph, unsigned long long flags, std::optional<int> priority,
                  const GraphTimes& times) noexcept {
  if (!on() || exec == nullptr || !can_cut()) return;
  const driver::RelaxedCapture relaxed;
  try {
    auto sliced = std::make_shared<Sliced>();
    sliced->exec = exec;
    sliced->context = driver::shareable_context();
    sliced->flags = flags;
    sliced->priority = priority;
    sliced->times = times;
    WholeReason why = clone(*sliced, graph);
    if (why == WholeReason::kNone &&
        (!get_nodes(graph, sliced->program_nodes) || !driver::registry().has_slices(exec, sliced.get()))) {
      sliced->clone.reset();
      why = WholeReason::kNoMemory;
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
  if (sliced->goes_whole || sliced->broken || !sliced->ordered.load(std::memory_order_relaxed) ||
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

// prepare(sliced, told) does the change to our clone and says what slices are told. The ring may make a thread wait for
// the gate, so nothing is held there.
template <typename Prepare>
void Slices::tell(CUgraphExec exec, Behind* behind, Prepare&& prepare) noexcept {
  const std::shared_ptr<Sliced> sliced = on() ? find(exec) : nullptr;
  if (sliced == nullptr) return;
  const driver::RelaxedCapture relaxed;
  Told told;
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
}

// driving_ is held.
bool Slices::change_pieces(Sliced& sliced, Told& told) {
  if (sliced.pieces == nullptr || told.change.bytes().empty()) return true;
  {
    const Taken taken(sliced);
    if (told.of == Sliced::kGraph) sliced.awaited.clear();  // of what it was before
    if (!sliced.awaited.make_all(*sliced.pieces, sliced.priority, sliced.context) ||
        !told.change.make(*sliced.pieces, sliced.priority, sliced.context)) {
      return false;
    }
  }
  sliced.proven.insert(told.of);
  return true;
}

// driving_ is held. After an update, our clone is what the graph is now; after any other change it may not be.
void Slices::did_not_follow(Sliced& sliced, const Told& told) noexcept {
  if (told.of != Sliced::kGraph) return give_up(sliced);
  WholeReason why = told.why;
  if (why == WholeReason::kNone && ++sliced.misfits >= kMostMisfits) why = WholeReason::kUpdated;
  sliced.generation.fetch_add(1);
  drop(sliced);
  sliced.least_launches.store(sliced.launches.load(std::memory_order_relaxed) + kSettled, std::memory_order_relaxed);
  if (why == WholeReason::kNone) return;
  sliced.clone.reset();
  note_whole(sliced, why);
}

// To another graph of the same nodes and edges, as the driver has verified.
void Slices::updated(CUgraphExec exec, CUgraph graph, Behind* behind) noexcept {
  tell(exec, behind, [&](Sliced& sliced, Told& told) { prepare_update(sliced, graph, told); });
}

// driving_ is held.
void Slices::prepare_update(Sliced& sliced, CUgraph graph, Told& told) {
  if (sliced.misfits >= kMostMisfits) {
    told.fits = sliced.pieces == nullptr;
    return;
  }
  const std::uint64_t launches = sliced.launches.load(std::memory_order_relaxed);
  const Sliced::State state = sliced.state.load();
  if (has_refused_slices(sliced)) drop(sliced);
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
  told.why = clone(sliced, graph);
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
  if (told.fits && state == Sliced::State::kWhole) sliced.state.store(Sliced::State::kIdle);
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
  if (sliced.clone_nodes.empty() && !get_nodes(sliced.clone.get(), sliced.clone_nodes)) return false;
  return number < sliced.clone_nodes.size() && (sliced.pieces == nullptr || number < sliced.places.size());
}

void Slices::node_changed(CUgraphExec exec, CUgraphNode node, CUcontext context, const Set& set,
                          Behind* behind) noexcept {
  tell(exec, behind, [&](Sliced& sliced, Told& told) {
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

void Slices::child_changed(CUgraphExec exec, CUgraphNode node, CUgraph child, Behind* behind) noexcept {
  tell(exec, behind, [&](Sliced& sliced, Told& told) {
    if (sliced.clone == nullptr) return;
    if (driver::registry().graphs_hold_objects()) return told.leave_objects_to_driver();
    told.of = 0;
    CUgraph ours = nullptr;
    CUgraph copy = nullptr;  // for slices
    ReadGraph to;
    ReadGraph from;
    told.fits = sliced.pieces == nullptr || table().graph_clone(&copy, child) == CUDA_SUCCESS;
    OwnedGraph owned = own(copy);
    told.fits = told.fits && find_number(sliced, node, told.of) && table().graph_child_node_get != nullptr &&
                table().graph_child_node_get(sliced.clone_nodes[told.of], &ours) == CUDA_SUCCESS &&
                read_graph(ours, true, to) && read_graph(copy != nullptr ? copy : child, true, from) &&
                is_alike(to, from);
    for (std::size_t i = 0; i < to.handles.size() && told.fits; ++i) {
      told.fits = to.is_mark(i) || copy_node(to.handles[i], from.handles[i]);
    }
    if (!told.fits) return;
    if (sliced.state.load() == Sliced::State::kBuilding) sliced.changed_meanwhile.insert(told.of);
    if (copy == nullptr) return;
    if (!sliced.pieces->children) from = {};
    told.change = Change::of_graph(std::move(owned), std::move(from), sliced.places[told.of]);
  });
}

void Slices::node_enabled(CUgraphExec exec, CUgraphNode node, bool enabled, Behind* behind) noexcept {
  tell(exec, behind, [&](Sliced& sliced, Told& told) {
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

// The clone is not what the graph is now. driving_ is held.
void Slices::give_up(Sliced& sliced) noexcept {
  sliced.generation.fetch_add(1);
  drop(sliced);
  sliced.clone.reset();
  sliced.clone_nodes.clear();
  note_whole(sliced, WholeReason::kUpdated);
}

void Slices::forget(CUgraphExec exec) noexcept {
  if (!on()) return;
  std::shared_ptr<Sliced> sliced;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = all_.find(exec);
    if (found == all_.end()) return;
    sliced = std::move(found->second);
    all_.erase(found);
  }
  const driver::RelaxedCapture relaxed;
  const Driving driving(*this);
  end(*sliced);
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
}

// driving_ is held.
void Slices::end(Sliced& sliced) noexcept {
  sliced.generation.fetch_add(1);
  drop(sliced);
  sliced.clone.reset();
  const Taken taken(sliced);
  if (sliced.event != nullptr) table().event_destroy(std::exchange(sliced.event, nullptr));
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
  sliced.reason.store(reason, std::memory_order_relaxed);
  sliced.state.store(Sliced::State::kWhole);
  if (driver::ExecFacts facts; driver::registry().find(sliced.exec, facts)) {
    const std::scoped_lock lock(ever_lock_);
    ever_[static_cast<std::size_t>(reason)].add(facts);
  }
  // The ticker says so: this may be the launcher thread.
  WholeReason none = WholeReason::kNone;
  if (is_failure(reason)) failed_.compare_exchange_strong(none, reason);
}

// ---- launches
// --------------------------------------------------------------------------------------------------------

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
  if (table().stream_wait_event(stream, sliced.event, CU_EVENT_WAIT_DEFAULT) != CUDA_SUCCESS) {
    table().event_synchronize(sliced.event);
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
  Launch launch{.sliced = sliced};
  {
    const std::scoped_lock turn(sliced->turn);
    const Sliced::State state = sliced->state.load(std::memory_order_relaxed);
    const bool settled = launches >= sliced->least_launches.load(std::memory_order_relaxed);
    Sliced::State idle = Sliced::State::kIdle;
    if (wants && settled && state == idle && sliced->state.compare_exchange_strong(idle, Sliced::State::kWanted)) {
      wanted_.store(true);
    }
    const bool is_followed = sliced->following > 0;  // the whole graph is what it will be after that
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

// While the GPU is at what was submitted before, or is about to be.
CUgraphExec Slices::part(const Launch& launch, std::uint32_t index) noexcept {
  Sliced& sliced = *launch.sliced;
  if (sliced.awaited.by(index)) {
    const driver::CurrentContext current(sliced.context);
    const std::scoped_lock reading(reading_);
    if (!sliced.awaited.make(index, *sliced.pieces, sliced.priority, sliced.context)) {
      const std::scoped_lock turn(sliced.turn);
      sliced.broken = true;
      return nullptr;
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
  // Behind what was submitted of it, where it failed midway.
  const bool ran = status == CUDA_SUCCESS || launch.parts > 0;
  const bool ordered = launch.orders && ran && table().event_record(sliced.event, stream) == CUDA_SUCCESS;
  if (ran) note_last(sliced, stream, context, ordered);
  bool is_followed = false;
  bool went_whole = false;
  {
    const std::scoped_lock turn(sliced.turn);
    is_followed = sliced.following > 0;
    went_whole = std::exchange(sliced.goes_whole, false);
    if (refused && went_whole) sliced.state.store(Sliced::State::kWhole);  // no change follows it from now on
  }
  // The next one goes in slices whatever its stream.
  if (is_followed && ran && !ordered) table().stream_synchronize.legacy(stream);
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
  } catch (const std::exception&) {
    made = false;  // no memory
  }
  const std::scoped_lock turn(sliced->turn);
  --sliced->following;
  sliced->broken = sliced->broken || !made;
}

// ---- the builder
// -----------------------------------------------------------------------------------------------------

void Slices::tick() noexcept {
  if (const WholeReason reason = failed_.load(std::memory_order_relaxed);
      reason != WholeReason::kNone && !std::exchange(said_failed_, true)) {
    std::array<char, 160> message{};
    std::snprintf(
        message.data(), message.size(),
        "a graph could not be cut into slices (%s) and is launched whole; cudasched.state() counts such graphs",
        graph::name(reason).data());
    log::warning(message.data());
  }
  if (!wanted_.load(std::memory_order_relaxed) || stopping_.load()) return;
  if (!running_ && !start_builder()) return;
  wanted_changed_.notify_one();
}

bool Slices::start_builder() noexcept {
  // The host program's signals are for its own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    std::thread([this] { run(); }).detach();
    running_ = true;
  } catch (const std::exception&) {
    wanted_.store(false);  // no thread is to be had: asked for again by the next graph
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return running_;
}

void Slices::run() noexcept {
  pthread_setname_np(pthread_self(), "cudasched-graph");
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  table().exchange_capture_mode(&mode);
  while (true) {
    const std::shared_ptr<Sliced> sliced = next_wanted();
    if (sliced != nullptr) {
      build(sliced);
      continue;
    }
    SliceSettings settings;
    {
      const std::scoped_lock driving(driving_);
      settings = settings_;
    }
    drop_idle(settings.idle_looks);
    look_at_times();
    std::unique_lock lock(mutex_);
    const auto is_wanted = [this] { return wanted_.load(std::memory_order_relaxed); };
    if (!watches_) {
      wanted_changed_.wait(lock, is_wanted);
    } else {
      wanted_changed_.wait_for(lock, std::chrono::nanoseconds(settings.look_ns), is_wanted);
    }
  }
}

// driving_, behind the program's threads that wait for it. Once the process exits the driver may be gone: does not
// return, and holds nothing that an exit handler of the program's may wait for.
std::unique_lock<std::mutex> Slices::drive() noexcept {
  while (waiting_to_drive_.load() > 0) sleep_ns(20'000);
  std::unique_lock lock(driving_);
  while (stopping_.load()) {
    lock.unlock();
    sleep_ns(kNsPerSecond);
    lock.lock();
  }
  return lock;
}

std::shared_ptr<Sliced> Slices::next_wanted() noexcept {
  const std::scoped_lock lock(mutex_);
  wanted_.store(false);
  std::shared_ptr<Sliced> most;
  for (const auto& [exec, sliced] : all_) {
    if (sliced->state.load() != Sliced::State::kWanted) continue;
    if (most == nullptr ||
        sliced->launches.load(std::memory_order_relaxed) > most->launches.load(std::memory_order_relaxed)) {
      most = sliced;
    }
  }
  if (most != nullptr) wanted_.store(true);  // look again behind it
  return most;
}

void Slices::build(const std::shared_ptr<Sliced>& sliced) noexcept {
  const std::int64_t begin_ns = now_ns();
  const std::uint64_t generation = sliced->generation.load();
  Sliced::State wanted = Sliced::State::kWanted;
  if (!sliced->state.compare_exchange_strong(wanted, Sliced::State::kBuilding)) return;
  bool late = false;
  bool lost = false;  // the graph is being destroyed, or its functions may be gone
  const Step step = [&](const std::function<void()>& what, bool always) {
    const std::unique_lock lock = drive();
    late = late || now_ns() - begin_ns > settings_.most_build_ns;
    // The registry forgets a graph before the program's thread comes to forget() here. Functions may be gone where a
    // module was unloaded and the graph has not been launched since.
    driver::ExecFacts facts;
    lost = lost || !driver::registry().find(sliced->exec, facts) ||
           sliced->launched_epoch.load(std::memory_order_relaxed) != unloads_.load();
    const bool goes_on = !late && !lost && sliced->generation.load() == generation;
    if (!goes_on && !always) return false;
    const driver::CurrentContext current(sliced->context);
    if (!current.ok() && !always) return false;
    what();
    return goes_on;
  };

  auto pieces = std::make_unique<Pieces>();
  WholeReason reason = WholeReason::kNone;
  try {
    reason = build_pieces(*sliced, step, *pieces);
  } catch (const std::exception&) {
    reason = WholeReason::kNoMemory;
  }
  if (!lost) builds_.fetch_add(1, std::memory_order_relaxed);
  build_ns_.fetch_add(static_cast<std::uint64_t>(now_ns() - begin_ns), std::memory_order_relaxed);
  const auto put_in_place = [&] {
    if (sliced->generation.load() != generation) return;  // the thread that changed it has set its state
    const auto keep_pieces = [&] {
      sliced->scale = sliced->pieces_scale;
      sliced->state.store(Sliced::State::kReady);
    };
    const bool had = sliced->pieces != nullptr;
    if (sliced->wants_clone) return sliced->state.store(Sliced::State::kIdle);  // until it is updated again
    if (lost && had) return keep_pieces();
    if (lost) return sliced->state.store(Sliced::State::kIdle);  // until a launch
    if (reason == WholeReason::kTooSlow && !late) reason = WholeReason::kNotBuilt;
    try {
      if (reason == WholeReason::kNone && !catch_up(*sliced, *pieces)) {
        reason = WholeReason::kUpdated;
        if (sliced->misfits < kMostMisfits) ++sliced->misfits;
      }
    } catch (const std::exception&) {
      reason = WholeReason::kNoMemory;
    }
    if (sliced->event == nullptr && table().event_create(&sliced->event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
      sliced->event = nullptr;
      if (reason == WholeReason::kNone) reason = WholeReason::kNotBuilt;
    }
    if (reason != WholeReason::kNone && had) return keep_pieces();
    if (reason != WholeReason::kNone) return note_whole(*sliced, reason);
    bytes_.fetch_sub(sliced->bytes, std::memory_order_relaxed);
    sliced->bytes = pieces->piece_of.size() * kNodeBytes + pieces->pieces.size() * kPieceBytes;
    sliced->slices.store(static_cast<std::uint32_t>(pieces->pieces.size()), std::memory_order_relaxed);
    bytes_.fetch_add(sliced->bytes, std::memory_order_relaxed);
    sliced->pieces.swap(pieces);
    sliced->pieces_scale = sliced->scale;
    sliced->awaited.clear();
    sliced->proven.clear();
    const std::scoped_lock turn(sliced->turn);
    sliced->broken = false;
    sliced->state.store(Sliced::State::kReady);
  };
  // The launcher has it for as long as the gate holds a launch of it. What the ring holds for the slices that it has is
  // not for these; no more is put there, because it is not ready.
  for (bool done = false; !done; sleep_ns(done ? 1 : kPollNs)) {
    step(
        [&] {
          if (!sliced->take()) return;
          if (is_followed(*sliced)) return sliced->release();
          put_in_place();
          sliced->release();
          pieces.reset();
          done = true;
        },
        true);
  }
}

WholeReason Slices::build_pieces(Sliced& sliced, const Step& step, Pieces& pieces) {
  const WholeReason reason = build_pieces(sliced, !children_stay_.load(std::memory_order_relaxed), step, pieces);
  if (reason != WholeReason::kNotBuilt || !pieces.child_refused) return reason;
  children_stay_.store(true);
  step([&] { pieces.clear(); }, true);
  return build_pieces(sliced, false, step, pieces);
}

void Slices::set_numbers(Sliced& sliced, const ReadGraph& read) {
  sliced.places.clear();
  for (std::uint32_t i = 0; i < read.handles.size(); ++i) {
    if (read.parents[i] == ReadGraph::kNowhere) sliced.places.push_back(i);
  }
}

WholeReason Slices::build_pieces(Sliced& sliced, bool children, const Step& step, Pieces& pieces) {
  CUgraph own = nullptr;
  CUstream upload = nullptr;
  ReadGraph read;
  std::vector<graph::Node> nodes;
  WholeReason reason = WholeReason::kNone;
  const auto stopped = [&](const std::function<void()>& what) {
    if (reason == WholeReason::kNone && !step(what, false)) reason = WholeReason::kTooSlow;
    return reason != WholeReason::kNone;
  };
  const auto give_back = [&] {
    step(
        [&] {
          if (own != nullptr) table().graph_clone_destroy(own);
          if (upload != nullptr) table().stream_destroy(upload);
        },
        true);
    return reason;
  };
  if (stopped([&] {
        sliced.changed_meanwhile.clear();
        sliced.updated_meanwhile = false;
        sliced.wants_clone = sliced.clone == nullptr;
        bool cloned = false;
        if (sliced.clone != nullptr) {
          const std::scoped_lock reading(reading_);
          cloned = table().graph_clone(&own, sliced.clone.get()) == CUDA_SUCCESS;
        }
        if (!cloned) {
          own = nullptr;
          reason = WholeReason::kNotCloned;
          return;
        }
        reason = why_whole(own);
        if (reason != WholeReason::kNone) return;
        driver::ExecFacts facts;
        if (!read_graph(own, children, read) || !driver::registry().find(sliced.exec, facts) ||
            facts.nodes !=
                static_cast<std::size_t>(std::count(read.parents.begin(), read.parents.end(), ReadGraph::kNowhere))) {
          reason = WholeReason::kCloneDiffers;
          return;
        }
        sliced.shape = read;
        set_numbers(sliced, read);
      })) {
    return give_back();
  }
  graph::Limits limits;
  std::uint64_t most_bytes = 0;
  if (stopped([&] {
        nodes = planned_nodes(read, sliced.context, sliced.times.kernel_ns);
        for (std::size_t i = 0; i < nodes.size() && !sliced.scale.empty(); ++i) {
          const double scale = sliced.scale[sliced.scale.size() == nodes.size() ? i : 0];
          nodes[i].predicted_ns = static_cast<std::int64_t>(static_cast<double>(nodes[i].predicted_ns) * scale);
        }
        limits.slice_ns = settings_.slice_ns;
        most_bytes = settings_.most_bytes;
      })) {
    return give_back();
  }

  const graph::Plan plan = graph::plan(nodes, read.edges, limits);
  if (!plan.cut()) reason = plan.whole;
  const std::uint64_t bytes = plan.slice_of.size() * kNodeBytes + plan.slices.size() * kPieceBytes;
  if (bytes_.load(std::memory_order_relaxed) + bytes > most_bytes && plan.cut()) {
    reason = WholeReason::kOverBudget;
  }
  if (stopped([&] {
        std::size_t free_bytes = 0;
        std::size_t all_bytes = 0;
        // What the program may want itself stays free.
        if (table().memory_get_info != nullptr && table().memory_get_info(&free_bytes, &all_bytes) == CUDA_SUCCESS &&
            free_bytes < 4 * bytes + all_bytes / 128) {
          reason = WholeReason::kNoMemory;
        } else if (table().stream_create(&upload, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) {
          upload = nullptr;
        }
      })) {
    return give_back();
  }

  const Instantiation how{.flags = (sliced.flags & kUseNodePriority) | (sliced.priority ? kUseNodePriority : 0),
                          .priority = sliced.priority,
                          .upload = upload};
  reason = cut(std::exchange(own, nullptr), read, plan, how, step, pieces);
  stopped([&] {
    for (std::size_t i = 0; i < pieces.pieces.size(); ++i) {
      const Pieces::Piece& piece = pieces.pieces[i];
      driver::registry().made(
          piece.exec, {.identity = mix(mix(sliced.identity, i + 1), pieces.pieces.size() << 8 | sliced.recuts) | 1,
                       .critical_path_ns = piece.critical_ns,
                       .nodes = piece.nodes,
                       .plain = true});
    }
  });
  bool uploaded = upload == nullptr;
  while (!uploaded && !stopped([&] { uploaded = table().stream_query.legacy(upload) != CUDA_ERROR_NOT_READY; })) {
    if (!uploaded) sleep_ns(kPollNs);
  }
  return give_back();
}

// Slices that turned out long are cut again, and so are graphs that were taken for short, and those whose slices are
// shorter than they were to be, so that there are too many.
void Slices::look_at_times() noexcept {
  std::vector<std::shared_ptr<Sliced>> known;
  try {
    const std::scoped_lock lock(mutex_);
    for (const auto& [exec, sliced] : all_) known.push_back(sliced);
  } catch (const std::exception&) {
    return;
  }
  for (const std::shared_ptr<Sliced>& sliced : known) {
    const std::unique_lock lock = drive();
    try {
      if (sliced->clone == nullptr || sliced->recuts == kMostRecuts || !wants_cutting_again(*sliced)) continue;
    } catch (const std::exception&) {
      continue;
    }
    ++sliced->recuts;
    sliced->state.store(Sliced::State::kWanted);
    wanted_.store(true);
  }
}

// driving_ is held.
bool Slices::wants_cutting_again(Sliced& sliced) {
  const Sliced::State state = sliced.state.load();
  const bool was_short = state == Sliced::State::kWhole && sliced.reason.load() == WholeReason::kShort;
  if (!was_short && state != Sliced::State::kReady) return false;
  const double before = sliced.scale.empty() ? 1.0 : sliced.scale.front();
  if (was_short) {
    driver::ExecFacts facts;
    if (!driver::registry().find(sliced.exec, facts)) return false;
    const graph::Measured whole{facts.critical_path_ns, sliced.times.measured_ns(sliced.exec), facts.nodes};
    const std::vector<double> factor = graph::corrections({&whole, 1}, settings_.slice_ns);
    if (factor.empty()) return false;
    sliced.scale = {before * factor.front()};
    return true;
  }
  std::vector<graph::Measured> measured;
  for (const Pieces::Piece& piece : sliced.pieces->pieces) {
    measured.push_back({piece.critical_ns, sliced.times.measured_ns(piece.exec), piece.nodes});
  }
  const std::vector<double> factors = graph::corrections(measured, settings_.slice_ns);
  if (factors.empty()) return false;
  const std::vector<std::uint32_t>& piece_of = sliced.pieces->piece_of;
  if (sliced.scale.size() != piece_of.size()) sliced.scale.assign(piece_of.size(), before);
  for (std::size_t i = 0; i < piece_of.size(); ++i) sliced.scale[i] *= factors[piece_of[i]];
  return true;
}

// What was changed since the clone was cloned, and what a clone does not carry.
bool Slices::catch_up(Sliced& sliced, const Pieces& pieces) {
  const auto make = [&](Change change) { return change.make(pieces, sliced.priority, sliced.context); };
  if (ReadGraph now; sliced.updated_meanwhile && (!read_graph(sliced.clone.get(), pieces.children, now) ||
                                                  !make(Change::of_graph(sliced.clone, std::move(now))))) {
    return false;
  }
  return std::all_of(sliced.changed_meanwhile.begin(), sliced.changed_meanwhile.end(),
                     [&](std::uint32_t node) {
                       return make(Change::of_node(sliced.clone_nodes[node], sliced.places[node]));
                     }) &&
         std::all_of(sliced.disabled.begin(), sliced.disabled.end(), [&](std::uint32_t node) {
           return node < sliced.places.size() && make(Change::of_switch(sliced.places[node], false));
         });
}

// Slices of graphs that are launched no more, and those that the driver has refused.
void Slices::drop_idle(int idle_looks) noexcept {
  std::vector<std::shared_ptr<Sliced>> idle;
  try {
    const std::scoped_lock lock(mutex_);
    std::erase_if(idle_, [&](const auto& known) { return !all_.contains(known.first); });
    watches_ = false;
    for (const auto& [exec, sliced] : all_) {
      const Sliced::State state = sliced->state.load();
      const bool refused = has_refused_slices(*sliced);
      watches_ = watches_ || refused || state == Sliced::State::kReady ||
                 (state == Sliced::State::kWhole && sliced->reason.load() == WholeReason::kShort);
      if (refused) idle.push_back(sliced);
      if (state != Sliced::State::kReady) {
        idle_.erase(exec);
        continue;
      }
      auto& [launches, looks] = idle_[exec];
      const std::uint64_t now = sliced->launches.load(std::memory_order_relaxed);
      looks = now == launches ? looks + 1 : 0;
      launches = now;
      if (looks >= idle_looks || is_broken(*sliced)) idle.push_back(sliced);
    }
  } catch (const std::exception&) {
    return;  // no memory: another time
  }
  for (const std::shared_ptr<Sliced>& sliced : idle) {
    const std::unique_lock lock = drive();
    // Not one that the launcher is at: the gate may hold it for long, and others wait for driving_.
    const bool refused = has_refused_slices(*sliced);
    if ((!refused && sliced->state.load() != Sliced::State::kReady) || !sliced->take()) continue;
    const Sliced::State now = refused ? Sliced::State::kWhole : Sliced::State::kIdle;
    std::unique_ptr<Pieces> pieces;
    if (stop_following(*sliced, now)) pieces = take_pieces(*sliced, now);
    sliced->release();
  }
}

// ---- what there is
// ---------------------------------------------------------------------------------------------------

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
      ++whole.graphs;
      driver::ExecFacts facts;
      if (!driver::registry().find(exec, facts)) continue;
      if (whole.longest_nodes == 0 || facts.critical_path_ns > whole.longest_ns) {
        whole.longest_ns = facts.critical_path_ns;
        whole.longest_nodes = facts.nodes;
      }
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

void Slices::stop() noexcept {
  stopping_.store(true);
  for (int tries = 0; tries < 200; ++tries) {
    if (driving_.try_lock()) {
      driving_.unlock();
      return;
    }
    sleep_ns(kNsPerMs);
  }
}

void Slices::reset_in_child() noexcept {
  // What the parent has is the parent's.
  const SliceSettings settings = settings_;
  new (this) Slices;
  settings_ = settings;
}

}  // namespace cudasched::runtime
