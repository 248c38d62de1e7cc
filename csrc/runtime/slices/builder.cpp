// The builder of Slices: a thread of its own that cuts clones of graphs into slices, again where these turn out too
// long or too short, and drops slices that are launched no more.
#include <pthread.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <exception>
#include <thread>
#include <utility>

#include "base/blocked_signals.hpp"
#include "base/hash.hpp"
#include "base/log.hpp"
#include "base/sleep.hpp"
#include "driver/driver.hpp"
#include "runtime/slices/slices.hpp"

namespace cudasched::runtime {
namespace {

using driver::table;
using graph::WholeReason;

constexpr std::int64_t kPollNs = 200 * kNsPerUs;

}  // namespace

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
  try {
    const BlockedSignals blocked;
    std::thread([this] { run(); }).detach();
    running_ = true;
  } catch (const std::exception&) {
    wanted_.store(false);  // no thread is to be had: asked for again by the next graph
  }
  return running_;
}

void Slices::run() noexcept {
  pthread_setname_np(pthread_self(), "cudasched-graph");
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  table().cuThreadExchangeStreamCaptureMode(&mode);
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
  Built built;
  const Step step = [&](const std::function<void()>& what, bool always) {
    const std::unique_lock lock = drive();
    built.late = built.late || now_ns() - begin_ns > settings_.most_build_ns;
    // The registry forgets a graph before the program's thread comes to forget() here. Functions may be gone where a
    // module was unloaded and the graph has not been launched since.
    driver::ExecFacts facts;
    built.lost = built.lost || !driver::registry().find(sliced->exec, facts) ||
                 sliced->launched_epoch.load(std::memory_order_relaxed) != unloads_.load();
    const bool goes_on = !built.late && !built.lost && sliced->generation.load() == generation;
    if (!goes_on && !always) return false;
    const driver::CurrentContext current(sliced->context);
    if (!current.ok() && !always) return false;
    what();
    return goes_on;
  };

  try {
    built.reason = build_pieces(*sliced, step, *built.pieces);
  } catch (const std::exception&) {
    built.reason = WholeReason::kNoMemory;
  }
  if (!built.lost) builds_.fetch_add(1, std::memory_order_relaxed);
  build_ns_.fetch_add(static_cast<std::uint64_t>(now_ns() - begin_ns), std::memory_order_relaxed);
  // The launcher has the graph for as long as the gate holds a launch of it. The ring's changes are for the graph's
  // present slices, not for the new ones; no more changes enter the ring, because the graph is not ready.
  for (bool done = false; !done; sleep_ns(done ? 1 : kPollNs)) {
    step(
        [&] {
          if (!sliced->take()) return;
          if (sliced->is_followed()) return sliced->release();
          // Else the thread that changed it has set its state.
          if (sliced->generation.load() == generation) put_in_place(*sliced, built);
          sliced->release();
          built.pieces.reset();
          done = true;
        },
        true);
  }
}

// driving_ is held, and the graph is taken.
void Slices::put_in_place(Sliced& sliced, Built& built) noexcept {
  const auto keep_pieces = [&] {
    sliced.scale = sliced.pieces_scale;
    sliced.state.store(Sliced::State::kReady);
  };
  const bool had = sliced.pieces != nullptr;
  if (sliced.wants_clone) return sliced.state.store(Sliced::State::kIdle);  // until it is updated again
  if (built.lost && had) return keep_pieces();
  if (built.lost) return sliced.state.store(Sliced::State::kIdle);  // until a launch
  if (built.reason == WholeReason::kTooSlow && !built.late) built.reason = WholeReason::kNotBuilt;
  try {
    if (built.reason == WholeReason::kNone && !catch_up(sliced, *built.pieces)) {
      built.reason = WholeReason::kUpdated;
      if (sliced.misfits < kMostMisfits) ++sliced.misfits;
    }
  } catch (const std::exception&) {
    built.reason = WholeReason::kNoMemory;
  }
  if (sliced.event == nullptr && table().cuEventCreate(&sliced.event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
    sliced.event = nullptr;
    if (built.reason == WholeReason::kNone) built.reason = WholeReason::kNotBuilt;
  }
  if (built.reason != WholeReason::kNone && had) return keep_pieces();
  if (built.reason != WholeReason::kNone) return note_whole(sliced, built.reason);
  bytes_.fetch_sub(sliced.bytes, std::memory_order_relaxed);
  sliced.bytes = built.pieces->piece_of.size() * kNodeBytes + built.pieces->pieces.size() * kPieceBytes;
  sliced.slices.store(static_cast<std::uint32_t>(built.pieces->pieces.size()), std::memory_order_relaxed);
  bytes_.fetch_add(sliced.bytes, std::memory_order_relaxed);
  sliced.pieces.swap(built.pieces);
  sliced.upload = upload_stream(sliced.context);
  sliced.pieces_scale = sliced.scale;
  sliced.awaited.clear();
  sliced.proven.clear();
  const std::scoped_lock turn(sliced.turn);
  sliced.broken = false;
  sliced.state.store(Sliced::State::kReady);
}

WholeReason Slices::build_pieces(Sliced& sliced, const Step& step, Pieces& pieces) {
  const WholeReason reason = build_pieces(sliced, !children_stay_.load(std::memory_order_relaxed), step, pieces);
  if (reason != WholeReason::kNotBuilt || !pieces.child_refused) return reason;
  children_stay_.store(true);
  step([&] { pieces.clear(); }, true);
  return build_pieces(sliced, false, step, pieces);
}

// The stream of the launcher thread's uploads. driving_ is held, and the context is current. Null: launches upload.
CUstream Slices::upload_stream(CUcontext context) noexcept {
  try {
    CUstream& stream = upload_streams_[context];
    if (stream == nullptr && table().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) stream = nullptr;
    return stream;
  } catch (const std::exception&) {
    return nullptr;
  }
}

void Slices::set_numbers(Sliced& sliced, const ReadGraph& read) {
  sliced.places.clear();
  for (std::uint32_t i = 0; i < read.handles.size(); ++i) {
    if (read.parents[i] == ReadGraph::kNowhere) sliced.places.push_back(i);
  }
}

// A clone of our clone, to be cut, and its contents. driving_ is held.
WholeReason Slices::copy_and_read(Sliced& sliced, bool children, CUgraph& own, ReadGraph& read) {
  sliced.changed_meanwhile.clear();
  sliced.updated_meanwhile = false;
  sliced.wants_clone = sliced.clone == nullptr;
  // While it is cut again, changes are for the slices that it has: nodes keep their numbers there.
  if (sliced.pieces != nullptr) children = sliced.pieces->children;
  bool cloned = false;
  if (sliced.clone != nullptr) {
    const std::scoped_lock reading(reading_);
    cloned = table().cuGraphClone(&own, sliced.clone.get()) == CUDA_SUCCESS;
  }
  if (!cloned) {
    own = nullptr;
    return WholeReason::kNotCloned;
  }
  if (const WholeReason why = why_whole(own); why != WholeReason::kNone) return why;
  driver::ExecFacts facts;
  if (!read_graph(own, children, read) || !driver::registry().find(sliced.exec, facts) ||
      facts.nodes !=
          static_cast<std::size_t>(std::count(read.parents.begin(), read.parents.end(), ReadGraph::kNowhere))) {
    return WholeReason::kCloneDiffers;
  }
  std::vector<CUgraphNode> own_nodes;
  if (!sliced.clone_nodes.empty() && (!get_nodes(own, own_nodes) || !are_paired(sliced.clone_nodes, own_nodes, own))) {
    return WholeReason::kCloneDiffers;
  }
  sliced.shape = read;
  set_numbers(sliced, read);
  return WholeReason::kNone;
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
          if (own != nullptr) table().cuGraphDestroy(own);
          if (upload != nullptr) table().cuStreamDestroy(upload);
        },
        true);
    return reason;
  };
  if (stopped([&] { reason = copy_and_read(sliced, children, own, read); })) return give_back();
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
        // Memory that the program may want stays free.
        if (table().cuMemGetInfo(&free_bytes, &all_bytes) == CUDA_SUCCESS && free_bytes < 4 * bytes + all_bytes / 128) {
          reason = WholeReason::kNoMemory;
        } else if (table().cuStreamCreate(&upload, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) {
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
  while (!uploaded && !stopped([&] { uploaded = table().cuStreamQuery.legacy(upload) != CUDA_ERROR_NOT_READY; })) {
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
    Sliced::State seen = sliced->state.load();  // the launcher may set it meanwhile
    try {
      if (sliced->clone == nullptr || sliced->recuts == kMostRecuts || !wants_cutting_again(*sliced, seen)) continue;
    } catch (const std::exception&) {
      continue;
    }
    if (!sliced->state.compare_exchange_strong(seen, Sliced::State::kWanted)) continue;
    ++sliced->recuts;
    wanted_.store(true);
  }
}

// driving_ is held.
bool Slices::wants_cutting_again(Sliced& sliced, Sliced::State state) {
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

// Makes the changes since the clone was cloned, and the changes that a clone does not carry.
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
      const bool refused = sliced->has_refused_slices();
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
      if (looks >= idle_looks || sliced->is_broken()) idle.push_back(sliced);
    }
  } catch (const std::exception&) {
    return;  // no memory: another time
  }
  for (const std::shared_ptr<Sliced>& sliced : idle) {
    const std::unique_lock lock = drive();
    // Not one that the launcher is at: the gate may hold it for long, and others wait for driving_.
    const bool refused = sliced->has_refused_slices();
    if ((!refused && sliced->state.load() != Sliced::State::kReady) || !sliced->take()) continue;
    const Sliced::State now = refused ? Sliced::State::kWhole : Sliced::State::kIdle;
    std::unique_ptr<Pieces> pieces;
    if (sliced->stop_following(now)) pieces = take_pieces(*sliced, now);
    sliced->release();
  }
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

}  // namespace cudasched::runtime
