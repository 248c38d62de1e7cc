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

Slices::Unloading::Unloading(Slices& slices) noexcept : driving_(slices) { slices.unloads_.fetch_add(1); }
Slices::Unloading::~Unloading() = default;

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
  if (table().graph_clone(&sliced.clone, graph) != CUDA_SUCCESS) {
    sliced.clone = nullptr;
    return WholeReason::kNotCloned;
  }
  sliced.identity = facts.identity;
  return WholeReason::kNone;
}

void Slices::made(CUgraphExec exec, CUgraph graph, unsigned long long flags, std::optional<int> priority,
                  const GraphTimes& times) noexcept {
  if (!on() || exec == nullptr || !can_cut()) return;
  const driver::RelaxedCapture relaxed;
  try {
    std::shared_ptr<Sliced> sliced = find(exec);
    if (sliced != nullptr) return updated(*sliced, graph);
    sliced = std::make_shared<Sliced>();
    sliced->exec = exec;
    sliced->context = driver::shareable_context();
    sliced->flags = flags;
    sliced->priority = priority;
    sliced->times = times;
    WholeReason why = clone(*sliced, graph);
    if (why == WholeReason::kNone &&
        (!get_nodes(graph, sliced->program_nodes) || !driver::registry().has_slices(exec, sliced.get()))) {
      table().graph_clone_destroy(std::exchange(sliced->clone, nullptr));
      why = WholeReason::kNoMemory;
    }
    if (why != WholeReason::kNone) note_whole(*sliced, why);
    const std::scoped_lock lock(mutex_);
    all_.insert_or_assign(exec, std::move(sliced));
  } catch (const std::exception&) {
    driver::registry().has_slices(exec, nullptr);  // no memory: whole
  }
}

// To another graph of the same nodes and edges, as the driver has verified; driving_ is not held.
void Slices::updated(Sliced& sliced, CUgraph graph) {
  const Driving driving(*this);
  if (sliced.misfits == kMostMisfits) return;
  const std::uint64_t launches = sliced.launches.load(std::memory_order_relaxed);
  const Sliced::State state = sliced.state.load();
  const bool has_pieces = sliced.pieces != nullptr && state != Sliced::State::kWhole;
  const bool often = sliced.changed_at && launches - *sliced.changed_at < kSettled;
  sliced.changed_at = launches;
  sliced.updated = true;
  const auto destroy = [](const CUgraph of) {
    if (of != nullptr) table().graph_clone_destroy(of);
  };
  CUgraph const old = std::exchange(sliced.clone, nullptr);
  sliced.clone_nodes.clear();
  sliced.changed_meanwhile.clear();
  // Of a graph that changes at nearly each launch, a clone is of use only where slices are wanted.
  const bool wanted = has_pieces || state == Sliced::State::kWanted || state == Sliced::State::kBuilding ||
                      sliced.wants_clone || !often;
  WholeReason why = wanted ? clone(sliced, graph) : WholeReason::kNone;
  if (why == WholeReason::kNone && !driver::registry().has_slices(sliced.exec, &sliced)) why = WholeReason::kNoMemory;
  bool fits = why == WholeReason::kNone;
  if (fits && (has_pieces || state == Sliced::State::kBuilding)) {
    fits = is_alike(sliced.shape, sliced.clone);
    if (has_pieces) {
      const Taken taken(sliced);
      fits = fits && take_over(sliced, *sliced.pieces);
    }
    if (fits && state == Sliced::State::kBuilding) sliced.updated_meanwhile = true;
    if (!fits) ++sliced.misfits;
  }
  destroy(old);
  if (fits) {
    if (state == Sliced::State::kWhole) sliced.state.store(Sliced::State::kIdle);
  } else {
    sliced.generation.fetch_add(1);
    drop(sliced);
    sliced.least_launches.store(launches + kSettled, std::memory_order_relaxed);
    if (sliced.misfits == kMostMisfits && why == WholeReason::kNone) why = WholeReason::kUpdated;
    if (why != WholeReason::kNone) {
      destroy(std::exchange(sliced.clone, nullptr));
      note_whole(sliced, why);
    }
  }
  if (why == WholeReason::kNone && launches > 0) driver::registry().launched(sliced.exec);
}

// Slices take over what the clone has now.
bool Slices::take_over(Sliced& sliced, const Pieces& pieces) {
  std::vector<CUgraphNode> nodes;
  if (table().graph_update == nullptr || !get_nodes(sliced.clone, nodes) || nodes.size() != pieces.handles.size()) {
    return false;
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (!copy_node(pieces.handles[i], nodes[i])) return false;
  }
  for (const Pieces::Piece& piece : pieces.pieces) {
    CUgraphExecUpdateResultInfo info{};
    if (sliced.priority) {
      driver::NodePriorities priorities(piece.graph);
      if (priorities.complete() && !priorities.set_for_good(*sliced.priority)) return false;
    }
    if (table().graph_update(piece.exec, piece.graph, &info) != CUDA_SUCCESS) return false;
  }
  return true;
}

bool Slices::find_place(Sliced& sliced, CUgraphNode node, std::uint32_t& place) {
  // Which of its nodes the driver has paired with which, it does not say.
  if (sliced.updated) return false;
  if (sliced.place_of.empty()) {
    for (std::uint32_t i = 0; i < sliced.program_nodes.size(); ++i) sliced.place_of.emplace(sliced.program_nodes[i], i);
  }
  const auto found = sliced.place_of.find(node);
  if (found == sliced.place_of.end()) return false;
  place = found->second;
  if (sliced.clone_nodes.empty() && !get_nodes(sliced.clone, sliced.clone_nodes)) return false;
  return place < sliced.clone_nodes.size();
}

bool Slices::set_piece(Sliced& sliced, const Pieces& pieces, std::uint32_t place) noexcept {
  return set_like(pieces.exec_of(place), pieces.handles[place], sliced.clone_nodes[place], sliced.context);
}

// What has been queued was drained, so slices may be changed at once.
void Slices::node_changed(CUgraphExec exec, CUgraphNode node, CUcontext context, const Change& change) noexcept {
  if (!on()) return;
  const std::shared_ptr<Sliced> sliced = find(exec);
  if (sliced == nullptr || sliced->clone == nullptr) return;
  const driver::RelaxedCapture relaxed;
  const Driving driving(*this);
  try {
    std::uint32_t place = 0;
    if ((context != nullptr && context != sliced->context) || !find_place(*sliced, node, place) ||
        change(sliced->clone_nodes[place]) != CUDA_SUCCESS) {
      return give_up(*sliced);
    }
    if (sliced->state.load() == Sliced::State::kBuilding) sliced->changed_meanwhile.insert(place);
    if (sliced->pieces != nullptr) {
      bool follows = false;
      {
        const Taken taken(*sliced);
        follows = set_piece(*sliced, *sliced->pieces, place);
      }
      if (!follows) return give_up(*sliced);
    }
    if (sliced->launches.load(std::memory_order_relaxed) > 0) driver::registry().launched(exec);
  } catch (const std::exception&) {
    give_up(*sliced);
  }
}

void Slices::node_enabled(CUgraphExec exec, CUgraphNode node, bool enabled) noexcept {
  if (!on()) return;
  const std::shared_ptr<Sliced> sliced = find(exec);
  if (sliced == nullptr) return;
  const driver::RelaxedCapture relaxed;
  const Driving driving(*this);
  try {
    std::uint32_t place = 0;
    if (sliced->clone == nullptr || !find_place(*sliced, node, place)) {
      // It outlives updates, and the next one would bring slices back that do not know of it.
      sliced->misfits = kMostMisfits;
      // One that was taken for short has a clone, too, and is cut when it turns out to be long.
      if (sliced->clone != nullptr || sliced->state.load() != Sliced::State::kWhole) give_up(*sliced);
      return;
    }
    if (enabled) {
      sliced->disabled.erase(place);
    } else {
      sliced->disabled.insert(place);
    }
    if (sliced->pieces != nullptr) {
      bool follows = false;
      {
        const Taken taken(*sliced);
        const Pieces& pieces = *sliced->pieces;
        follows =
            table().graph_exec_enable(pieces.exec_of(place), pieces.handles[place], enabled ? 1 : 0) == CUDA_SUCCESS;
      }
      if (!follows) return give_up(*sliced);
    }
    if (sliced->launches.load(std::memory_order_relaxed) > 0) driver::registry().launched(exec);
  } catch (const std::exception&) {
    give_up(*sliced);
  }
}

void Slices::changed(CUgraphExec exec) noexcept {
  if (!on()) return;
  const std::shared_ptr<Sliced> sliced = find(exec);
  if (sliced == nullptr || sliced->clone == nullptr) return;
  const driver::RelaxedCapture relaxed;
  const Driving driving(*this);
  give_up(*sliced);
}

// The clone is not what the graph is now. driving_ is held.
void Slices::give_up(Sliced& sliced) noexcept {
  sliced.generation.fetch_add(1);
  drop(sliced);
  if (sliced.clone != nullptr) table().graph_clone_destroy(std::exchange(sliced.clone, nullptr));
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
  if (sliced.clone != nullptr) table().graph_clone_destroy(std::exchange(sliced.clone, nullptr));
  const Taken taken(sliced);
  if (sliced.event != nullptr) table().event_destroy(std::exchange(sliced.event, nullptr));
  sliced.last = {};
}

// driving_ is held, and the graph is taken.
std::unique_ptr<Pieces> Slices::take_pieces(Sliced& sliced) noexcept {
  bytes_.fetch_sub(std::exchange(sliced.bytes, 0), std::memory_order_relaxed);
  sliced.slices.store(0, std::memory_order_relaxed);
  sliced.state.store(Sliced::State::kIdle);
  if (sliced.pieces != nullptr) dropped_.fetch_add(1, std::memory_order_relaxed);
  return std::move(sliced.pieces);
}

// driving_ is held.
void Slices::drop(Sliced& sliced) noexcept {
  std::unique_ptr<Pieces> pieces;
  const Taken taken(sliced);
  pieces = take_pieces(sliced);
}

void Slices::note_whole(Sliced& sliced, WholeReason reason) noexcept {
  sliced.reason.store(reason, std::memory_order_relaxed);
  sliced.state.store(Sliced::State::kWhole);
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
  while (!sliced->take()) sched_yield();  // for a moment: nobody else keeps it
  const std::uint64_t launches = sliced->launches.fetch_add(1, std::memory_order_relaxed) + 1;
  sliced->launched_epoch.store(unloads_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  const bool wants = settings_.when == SliceSettings::When::kAlways || beside_latency;
  Launch launch{.sliced = sliced};
  const Sliced::State state = sliced->state.load(std::memory_order_relaxed);
  if (wants && state == Sliced::State::kIdle && launches >= sliced->least_launches.load(std::memory_order_relaxed)) {
    Sliced::State idle = Sliced::State::kIdle;
    if (sliced->state.compare_exchange_strong(idle, Sliced::State::kWanted)) wanted_.store(true);
  }
  if (wants && sliced->pieces != nullptr && state != Sliced::State::kWhole && context == sliced->context) {
    launch.orders = true;
    if (sliced->last.ordered || is_last(*sliced, stream, context)) {
      launch.parts = static_cast<std::uint32_t>(sliced->pieces->pieces.size());
      sliced->was_sliced.store(true, std::memory_order_relaxed);
    }
  }
  order(*sliced, stream, context);
  return launch;
}

void Slices::end(const Launch& launch, CUstream stream, CUcontext context, CUresult status, bool refused) noexcept {
  if (launch.sliced == nullptr) return;
  Sliced& sliced = *launch.sliced;
  // Behind what was submitted of it, where it failed midway.
  const bool ran = status == CUDA_SUCCESS || launch.parts > 0;
  const bool ordered = launch.orders && ran && table().event_record(sliced.event, stream) == CUDA_SUCCESS;
  if (ran) note_last(sliced, stream, context, ordered);
  if (refused) note_whole(sliced, WholeReason::kRefused);
  sliced.release();
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
    drop_idle();
    look_at_times();
    std::unique_lock lock(mutex_);
    const auto is_wanted = [this] { return wanted_.load(std::memory_order_relaxed); };
    if (!watches_) {
      wanted_changed_.wait(lock, is_wanted);
    } else {
      wanted_changed_.wait_for(lock, std::chrono::nanoseconds(kLookNs), is_wanted);
    }
  }
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
  bool unloaded = false;
  const Step step = [&](const std::function<void()>& what, bool always) {
    while (waiting_to_drive_.load() > 0) sleep_ns(20'000);
    const std::scoped_lock lock(driving_);
    while (stopping_.load()) sleep_ns(kNsPerSecond);  // the process exits: the driver may be gone
    late = late || now_ns() - begin_ns > settings_.most_build_ns;
    // Of a graph that has not been launched since a module was unloaded, the functions may be gone.
    unloaded = unloaded || sliced->launched_epoch.load(std::memory_order_relaxed) != unloads_.load();
    const bool goes_on = !late && !unloaded && sliced->generation.load() == generation;
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
  builds_.fetch_add(1, std::memory_order_relaxed);
  build_ns_.fetch_add(static_cast<std::uint64_t>(now_ns() - begin_ns), std::memory_order_relaxed);
  const auto put_in_place = [&] {
    if (sliced->generation.load() != generation) return;  // who changed it has said what it is now
    const bool had = sliced->pieces != nullptr;
    if (sliced->wants_clone) return sliced->state.store(Sliced::State::kIdle);  // until it is updated again
    if (unloaded) return sliced->state.store(had ? Sliced::State::kReady : Sliced::State::kIdle);  // until a launch
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
    if (reason != WholeReason::kNone && had) return sliced->state.store(Sliced::State::kReady);  // those it has
    if (reason != WholeReason::kNone) return note_whole(*sliced, reason);
    bytes_.fetch_sub(sliced->bytes, std::memory_order_relaxed);
    sliced->bytes = pieces->piece_of.size() * kNodeBytes + pieces->pieces.size() * kPieceBytes;
    sliced->slices.store(static_cast<std::uint32_t>(pieces->pieces.size()), std::memory_order_relaxed);
    bytes_.fetch_add(sliced->bytes, std::memory_order_relaxed);
    sliced->pieces.swap(pieces);
    sliced->state.store(Sliced::State::kReady);
  };
  // The launcher has it for as long as the gate holds a launch of it.
  for (bool done = false; !done; sleep_ns(done ? 1 : kPollNs)) {
    step(
        [&] {
          if (!sliced->take()) return;
          put_in_place();
          sliced->release();
          pieces.reset();
          done = true;
        },
        true);
  }
}

WholeReason Slices::build_pieces(Sliced& sliced, const Step& step, Pieces& pieces) {
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
        if (sliced.clone == nullptr || table().graph_clone(&own, sliced.clone) != CUDA_SUCCESS) {
          own = nullptr;
          reason = WholeReason::kNotCloned;
        } else if (reason = why_whole(own); reason == WholeReason::kNone && !read_graph(own, read)) {
          reason = WholeReason::kCloneDiffers;
        } else {
          sliced.shape = read;
        }
      })) {
    return give_back();
  }
  if (stopped([&] {
        nodes = planned_nodes(read, sliced.context, sliced.times.kernel_ns);
        for (std::size_t i = 0; i < std::min(nodes.size(), sliced.scale.size()); ++i) {
          nodes[i].predicted_ns =
              static_cast<std::int64_t>(static_cast<double>(nodes[i].predicted_ns) * sliced.scale[i]);
        }
      })) {
    return give_back();
  }

  graph::Limits limits;
  limits.slice_ns = settings_.slice_ns;
  const graph::Plan plan = graph::plan(nodes, read.edges, limits);
  if (!plan.cut()) reason = plan.whole;
  const std::uint64_t bytes = plan.slice_of.size() * kNodeBytes + plan.slices.size() * kPieceBytes;
  if (bytes_.load(std::memory_order_relaxed) + bytes > settings_.most_bytes && plan.cut()) {
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
  reason = cut(std::exchange(own, nullptr), plan, how, step, pieces);
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

// Slices that turned out long are cut again, and so are graphs that were taken for short.
void Slices::look_at_times() noexcept {
  std::vector<std::shared_ptr<Sliced>> known;
  try {
    const std::scoped_lock lock(mutex_);
    for (const auto& [exec, sliced] : all_) known.push_back(sliced);
  } catch (const std::exception&) {
    return;
  }
  for (const std::shared_ptr<Sliced>& sliced : known) {
    while (waiting_to_drive_.load() > 0) sleep_ns(20'000);
    const std::scoped_lock lock(driving_);
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
  const auto turned_out = [&](CUgraphExec exec, std::int64_t predicted_ns) {
    const std::int64_t measured_ns = predicted_ns > 0 ? sliced.times.measured_ns(exec) : 0;
    return measured_ns > 2 * settings_.slice_ns ? static_cast<double>(measured_ns) / static_cast<double>(predicted_ns)
                                                : 1.0;
  };
  std::vector<double> factors;  // of slices, or of the whole
  bool is_long = false;
  if (was_short) {
    driver::ExecFacts facts;
    if (!driver::registry().find(sliced.exec, facts)) return false;
    factors.push_back(turned_out(sliced.exec, facts.critical_path_ns));
    is_long = factors.back() > 1;
  } else {
    for (const Pieces::Piece& piece : sliced.pieces->pieces) {
      factors.push_back(piece.nodes > 1 ? turned_out(piece.exec, piece.critical_ns) : 1.0);
      is_long = is_long || factors.back() > 1;
    }
  }
  if (!is_long) return false;
  const std::size_t nodes = was_short ? sliced.program_nodes.size() : sliced.pieces->piece_of.size();
  sliced.scale.resize(nodes, 1.0);
  for (std::size_t i = 0; i < nodes; ++i)
    sliced.scale[i] *= was_short ? factors[0] : factors[sliced.pieces->piece_of[i]];
  return true;
}

// What was changed since the clone was cloned, and what a clone does not carry.
bool Slices::catch_up(Sliced& sliced, const Pieces& pieces) {
  if (sliced.updated_meanwhile && !take_over(sliced, pieces)) return false;
  return std::all_of(sliced.changed_meanwhile.begin(), sliced.changed_meanwhile.end(),
                     [&](std::uint32_t place) { return set_piece(sliced, pieces, place); }) &&
         std::all_of(sliced.disabled.begin(), sliced.disabled.end(), [&](std::uint32_t place) {
           return table().graph_exec_enable != nullptr && place < pieces.handles.size() &&
                  table().graph_exec_enable(pieces.exec_of(place), pieces.handles[place], 0) == CUDA_SUCCESS;
         });
}

// Slices of graphs that are launched no more.
void Slices::drop_idle() noexcept {
  std::vector<std::shared_ptr<Sliced>> idle;
  try {
    const std::scoped_lock lock(mutex_);
    std::erase_if(idle_, [&](const auto& known) { return !all_.contains(known.first); });
    watches_ = false;
    for (const auto& [exec, sliced] : all_) {
      const Sliced::State state = sliced->state.load();
      watches_ = watches_ || state == Sliced::State::kReady ||
                 (state == Sliced::State::kWhole && sliced->reason.load() == WholeReason::kShort);
      if (state != Sliced::State::kReady) {
        idle_.erase(exec);
        continue;
      }
      auto& [launches, looks] = idle_[exec];
      const std::uint64_t now = sliced->launches.load(std::memory_order_relaxed);
      looks = now == launches ? looks + 1 : 0;
      launches = now;
      if (looks >= kIdleLooks) idle.push_back(sliced);
    }
  } catch (const std::exception&) {
    return;  // no memory: another time
  }
  for (const std::shared_ptr<Sliced>& sliced : idle) {
    while (waiting_to_drive_.load() > 0) sleep_ns(20'000);
    const std::scoped_lock lock(driving_);
    while (stopping_.load()) sleep_ns(kNsPerSecond);
    // Not one that the launcher is at: the gate may hold it for long, and others wait for driving_.
    if (sliced->state.load() != Sliced::State::kReady || !sliced->take()) continue;
    const std::unique_ptr<Pieces> pieces = take_pieces(*sliced);
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
    if (slices != 0) {
      ++counts.graphs_sliced;
      counts.slices += slices;
    } else if (state == Sliced::State::kWhole) {
      ++counts.whole[static_cast<std::size_t>(sliced->reason.load(std::memory_order_relaxed))];
      driver::ExecFacts facts;
      if (driver::registry().find(exec, facts)) {
        counts.longest_whole_ns = std::max(counts.longest_whole_ns, facts.critical_path_ns);
      }
    }
  }
  return counts;
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
