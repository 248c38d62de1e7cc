// Executable graphs that can be launched in slices: which there are, which have slices, and how a launch of one is
// ordered behind the last. One a process.
//
// The way of a graph: at instantiation, the program's thread makes one clone, which is ours from then on. No other
// thread ever touches the program's graph. While a latency client is on the device, a launch asks for slices. A builder
// thread cuts the clone (builder.cpp, cut.hpp), the most-launched graph first. The thread starts with the first request
// for slices, and sleeps when there is nothing to build. The launcher thread then submits a launch slice by slice, each
// through the gate. Until slices are there, and while no latency client is, the graph goes whole.
//
// Changes of an executable graph go to the whole one at once, for the driver's verdict, and to our clone. The slices
// get changes at once, too, where no launch of the graph is queued; else through the ring, behind these launches
// (UpdateQueue, follow()). Until the launcher has made the last such change, these launches go in slices, because the
// whole graph already has the changes. A change is queued only where its like was made directly before, so that the
// driver has no reason to refuse it.
//
// Order: CUDA runs launches of one executable graph one after another, on whichever streams; slices do not share that.
// So a launch on another stream than the last one's waits for an event behind the last launch. Where there is no such
// event, the launch goes whole, and records one for the next.
//
// Locks: mutex_ guards the list. The builder holds driving_ for each step that calls the driver: a thread of the
// program that ends a context, unloads a module or destroys a graph waits for one such step at most. A graph is taken
// (Sliced::taken) for the length of a launch's submission, and while its slices are put in place, changed or taken
// away. Sliced::turn is held for a moment, for the decision whether a launch goes whole and whether a change may follow
// the launch. The launcher thread makes awaited changes without driving_ and with reading_. The builder holds reading_
// while it clones our clone: both may read the same graph, and CUDA does not synchronise even reads. Nothing here is on
// the way of a launch on the program's own thread, but before_direct() and after_direct().
#pragma once

#include <cuda.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/clock.hpp"
#include "base/spin_lock.hpp"
#include "driver/registry.hpp"
#include "graph/reason.hpp"
#include "runtime/graphs.hpp"
#include "runtime/slices/change.hpp"
#include "runtime/slices/cut.hpp"
#include "runtime/slices/settings.hpp"

namespace cudasched::runtime {

// How long things take, as the device's predictor says.
struct GraphTimes {
  Graphs::Estimate kernel_ns;
  std::function<std::int64_t(CUgraphExec)> measured_ns;  // of launches of it, or of a slice; 0: not known yet
};

// One executable graph. Members without another note belong to the thread that has taken the graph.
struct Sliced {
  enum class State : std::uint8_t {
    kIdle,      // no launch has asked for slices
    kWanted,    // one has. It may have slices meanwhile: longer ones than they should be
    kBuilding,  // likewise
    kReady,
    kWhole,
  };

  // The place of the last launch.
  struct Last {
    CUstream stream = nullptr;
    CUcontext context = nullptr;
    std::uint64_t epoch = 0;  // of streams: its handle may have come back for another one
    bool ordered = false;     // `event` is behind it
  };

  // The object of a change that is not of a node.
  enum : std::uint32_t { kGraph = ~std::uint32_t{0}, kSwitch = kGraph - 1 };

  CUgraphExec exec = nullptr;
  CUcontext context = nullptr;
  unsigned long long flags = 0;
  std::uint64_t identity = 0;
  GraphTimes times;

  std::atomic<bool> taken{false};
  std::atomic<State> state{State::kIdle};
  std::atomic<graph::WholeReason> reason{graph::WholeReason::kNone};  // where it is kWhole
  std::atomic<std::uint32_t> slices{0};                               // that it has
  std::atomic<std::uint64_t> launches{0};
  std::atomic<std::uint64_t> launched_epoch{0};  // of unloads, at the last launch
  std::atomic<bool> was_sliced{false};           // some launch of it
  std::atomic<std::uint64_t> generation{0};      // rises when the graph changes or goes: outdates a build
  std::atomic<std::uint64_t> least_launches{0};  // before slices are built, or built again
  std::atomic<std::uint32_t> whole_for{0};       // reasons, a bit each, ever

  // Under `turn`.
  SpinLock turn;
  std::uint32_t following = 0;  // changes that the ring holds for its slices, or may get
  bool goes_whole = false;      // the launch that the launcher is at
  bool broken = false;          // a change that the ring held could not be made
  bool was_refused = false;     // the first slice of the last launch, which could not go whole: a change followed it

  // Under driving_.
  std::shared_ptr<GivenBack> given_back = std::make_shared<GivenBack>();  // clones; of child graphs, by their nodes
  OwnedGraph clone;                                          // kept current; null: the graph cannot be built
  std::vector<CUgraphNode> clone_nodes;                      // in the order of cuGraphGetNodes; none after an update
  std::vector<CUgraphNode> program_nodes;                    // of the program's graph, named by its changes
  std::unordered_map<CUgraphNode, std::uint32_t> number_of;  // of program_nodes; made at the first change
  std::set<std::uint32_t> disabled;                          // nodes, by their numbers
  ReadGraph shape;                                           // the graph that slices were, or are being, made of
  std::vector<std::uint32_t> places;                         // there, by the numbers of the graph's own nodes
  std::set<std::uint32_t> proven;    // whose changes slices have followed: nodes, kGraph, kSwitch
  std::vector<double> scale;         // by place: time, in terms of the prediction. One: of each; empty: as predicted
  std::vector<double> pieces_scale;  // by which the slices that it has were made
  unsigned recuts = 0;
  std::set<std::uint32_t> changed_meanwhile;  // nodes, since the build that is under way began
  std::optional<int> priority;
  bool wants_clone = false;                 // a launch wants slices, and there was none to make them of
  bool updated = false;                     // to another graph, ever,
  bool updated_meanwhile = false;           // and since the build that is under way began
  unsigned misfits = 0;                     // updates that slices did not follow
  std::optional<std::uint64_t> changed_at;  // launches, at the last update

  std::unique_ptr<Pieces> pieces;
  Awaited awaited;  // by these
  std::atomic<bool> may_await{false};
  std::atomic<std::uint64_t> told{0};  // all that it awaited, so many times
  std::uint64_t bytes = 0;
  Last last;
  std::atomic<bool> ordered{false};  // as last.ordered
  CUevent event = nullptr;
  CUstream upload = nullptr;  // its context's, for the launcher thread

  bool take() noexcept { return !taken.exchange(true, std::memory_order_acquire); }
  void release() noexcept { taken.store(false, std::memory_order_release); }

  bool is_followed() noexcept {
    const std::scoped_lock lock(turn);
    return following > 0;
  }
  bool is_broken() noexcept {
    const std::scoped_lock lock(turn);
    return broken;
  }
  // No change is queued for its slices, or will be: from then on its state is `now`.
  bool stop_following(State now) noexcept {
    const std::scoped_lock lock(turn);
    if (following > 0) return false;
    state.store(now);
    return true;
  }
  // It has some of no use any more.
  bool has_refused_slices() const noexcept {
    return state.load() == State::kWhole && slices.load(std::memory_order_relaxed) != 0;
  }
};

// Taken for the length of a scope. The launcher may have it for as long as the gate holds a launch, but queued launches
// are drained before a graph changes.
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

// Executable graphs that stay whole for one reason.
struct WholeGraphs {
  std::uint64_t graphs = 0;
  std::int64_t longest_ns = 0;  // as predicted
  std::uint32_t longest_nodes = 0;

  void add(const driver::ExecFacts& facts) noexcept {
    ++graphs;
    if (longest_nodes != 0 && facts.critical_path_ns <= longest_ns) return;
    longest_ns = facts.critical_path_ns;
    longest_nodes = facts.nodes;
  }
};

// As `cudasched.state()` has them.
struct SliceCounts {
  std::uint64_t graphs_sliced = 0;  // executable graphs that have slices now,
  std::uint64_t slices = 0;         // so many,
  std::uint64_t bytes = 0;          // of about so much memory
  std::uint64_t builds = 0;
  std::uint64_t build_ns = 0;  // of the builder thread, in all
  std::uint64_t dropped = 0;   // graphs whose slices were given up: updated, or launched no more
  std::array<WholeGraphs, graph::kWholeReasons> whole{};  // by reason
};

class Slices {
 public:
  // While no program makes, changes or launches a graph; the builder may be at work.
  void configure(const SliceSettings& settings) noexcept;
  bool on() const noexcept { return settings_.when != SliceSettings::When::kOff; }

  // ---- the program's threads, off the launch path
  // `exec` was instantiated from `graph`.
  void made(CUgraphExec exec, CUgraph graph, unsigned long long flags, std::optional<int> priority,
            const GraphTimes& times) noexcept;

  // Launches of a graph that are queued when it is changed, and that follow() was true of.
  class UpdateQueue {
   public:
    virtual ~UpdateQueue() = default;
    // Puts the change behind them; false: it cannot be queued.
    virtual bool push(CUgraphExec exec, CUcontext context, std::span<const std::byte> change) noexcept = 0;
    // Waits until they are submitted.
    virtual void drain() noexcept = 0;
  };
  // Before the driver changes `exec`, of which launches are queued: do all of these go in slices of the old graph? Then
  // the graph may change at once, and the change is told behind these launches, or followed() where the driver refuses.
  // False: these launches are to be submitted first.
  bool follow(CUgraphExec exec) noexcept;
  void followed(CUgraphExec exec) noexcept;

  bool has_slices(CUgraphExec exec) const noexcept {
    const auto* const sliced = static_cast<const Sliced*>(driver::registry().slices(exec));
    return sliced != nullptr && sliced->slices.load(std::memory_order_relaxed) != 0;
  }
  // The driver has updated it to another graph; null `behind`: nothing of it is queued.
  void updated(CUgraphExec exec, CUgraph graph, UpdateQueue* behind) noexcept;
  // The driver has changed a node of it. `set` does the same to that node in our clone.
  using Set = std::function<CUresult(CUgraphNode)>;
  void node_changed(CUgraphExec exec, CUgraphNode node, CUcontext context, const Set& set,
                    UpdateQueue* behind) noexcept;
  // The nodes in a child graph were changed to another graph's.
  void child_changed(CUgraphExec exec, CUgraphNode node, CUgraph child, UpdateQueue* behind) noexcept;
  void node_enabled(CUgraphExec exec, CUgraphNode node, bool enabled, UpdateQueue* behind) noexcept;
  // Before the driver destroys it.
  void forget(CUgraphExec exec) noexcept;
  // Before the driver ends a context; null: any.
  void context_ends(CUcontext context) noexcept;
  void stream_ends() noexcept { streams_ended_.fetch_add(1, std::memory_order_relaxed); }

  // driving_, before the builder's next step.
  class Driving {
   public:
    explicit Driving(Slices& slices) noexcept;
    ~Driving();
    Driving(const Driving&) = delete;
    Driving& operator=(const Driving&) = delete;

   private:
    Slices& slices_;
  };

  // While the driver ends a module's functions, nothing of ours looks at them. Queued launches have been submitted;
  // `submit_queued` is called where launches were made since, of which one is at a closed gate.
  class Unloading {
   public:
    Unloading(Slices& slices, bool (*submit_queued)() noexcept) noexcept;
    ~Unloading();
    Unloading(const Unloading&) = delete;
    Unloading& operator=(const Unloading&) = delete;

   private:
    std::optional<Driving> driving_;
  };

  // ---- launches on the program's own thread, which go whole; on streams that do not capture
  // Has the graph been launched in slices, or may it be soon? Then queued launches must have been submitted, and
  // before_direct() be called, just before the driver is.
  static bool may_be_sliced(CUgraphExec exec) noexcept {
    const auto* const sliced = static_cast<const Sliced*>(driver::registry().slices(exec));
    if (sliced == nullptr) return false;
    const Sliced::State state = sliced->state.load(std::memory_order_seq_cst);
    return sliced->was_sliced.load(std::memory_order_relaxed) ||
           (state != Sliced::State::kIdle && state != Sliced::State::kWhole);
  }
  // Orders `stream` behind the last launch, where the driver does not.
  void before_direct(CUgraphExec exec, CUstream stream) noexcept;
  // It was launched there, with success.
  void after_direct(CUgraphExec exec, CUstream stream) noexcept;

  // ---- the launcher thread's
  struct Launch {
    Sliced* sliced = nullptr;  // taken; null: nothing is known of the graph
    std::uint32_t parts = 0;   // 0: it goes whole
    bool orders = false;       // an event goes behind it
    bool is_lost = false;      // neither the slices nor the whole graph are current
  };
  Launch begin(CUgraphExec exec, CUstream stream, CUcontext context, bool beside_latency) noexcept;
  // See queue::Admission.
  CUgraphExec part(const Launch& launch, std::uint32_t index, bool may_upload) noexcept;
  bool may_go_whole(const Launch& launch) noexcept;
  void make_change(CUgraphExec exec, std::byte* change) noexcept;
  // `refused`: the driver would not have the first slice.
  void end(const Launch& launch, CUstream stream, CUcontext context, CUresult status, bool refused) noexcept;

  // ---- the ticker's
  void tick() noexcept;

  // Looks at every graph.
  SliceCounts counts() noexcept;
  // The same, as of a second ago at most. For the ticker, and for callers that ask for the ticker's published counts.
  std::array<WholeGraphs, graph::kWholeReasons> whole_lately() noexcept;
  // Of all graphs that there ever were. One that was found to stay whole for several reasons is there with each.
  std::array<WholeGraphs, graph::kWholeReasons> whole_ever() noexcept;
  // At exit: the builder calls the driver no more.
  void stop() noexcept;
  void reset_in_child() noexcept;

 private:
  // A change as the slices get it.
  struct SliceUpdate {
    std::uint32_t of = Sliced::kGraph;
    bool fits = true;                                    // else the slices are given up
    Change change;                                       // without bytes: there are no slices
    graph::WholeReason why = graph::WholeReason::kNone;  // the graph stays whole from now on

    // The driver releases objects that an update replaces, behind the launches that it has seen. Slices have references
    // to the objects that their graph was built with alone: launches of the updated graph go whole.
    void leave_objects_to_driver() noexcept {
      fits = false;
      why = graph::WholeReason::kUpdated;
    }
  };

  // A graph whose slices await changes, and how often it had been told by then.
  struct AwaitingGraph {
    std::shared_ptr<Sliced> sliced;
    std::uint64_t told = 0;
  };

  static constexpr std::int64_t kLatelyNs = kNsPerSecond / 2;  // as old as whole_lately() may be
  static constexpr unsigned kMostRecuts = 3;
  static constexpr unsigned kMostMisfits = 3;
  static constexpr std::uint64_t kSettled = 16;  // launches between two changes, for slices to be worth building anew
  static constexpr std::uint64_t kPieceBytes = 64 << 10;
  static constexpr std::uint64_t kNodeBytes = 4 << 10;

  bool start_builder() noexcept;
  void run() noexcept;
  std::unique_lock<std::mutex> drive() noexcept;
  std::shared_ptr<Sliced> next_wanted() noexcept;
  void build(const std::shared_ptr<Sliced>& sliced) noexcept;
  struct Built {
    std::unique_ptr<Pieces> pieces = std::make_unique<Pieces>();
    graph::WholeReason reason = graph::WholeReason::kNone;
    bool late = false;
    bool lost = false;  // the graph is being destroyed, or its functions may be gone
  };
  void put_in_place(Sliced& sliced, Built& built) noexcept;
  graph::WholeReason copy_and_read(Sliced& sliced, bool children, CUgraph& own, ReadGraph& read);
  graph::WholeReason build_pieces(Sliced& sliced, const Step& step, Pieces& pieces);
  graph::WholeReason build_pieces(Sliced& sliced, bool children, const Step& step, Pieces& pieces);
  bool catch_up(Sliced& sliced, const Pieces& pieces);
  CUstream upload_stream(CUcontext context) noexcept;
  std::unique_ptr<Pieces> take_pieces(Sliced& sliced, Sliced::State now) noexcept;
  void drop(Sliced& sliced) noexcept;
  void end(Sliced& sliced) noexcept;
  std::shared_ptr<Sliced> find(CUgraphExec exec) noexcept;
  graph::WholeReason why_not_cloned(const Sliced& sliced, driver::ExecFacts& facts) const noexcept;
  graph::WholeReason clone(Sliced& sliced, CUgraph graph, const driver::ExecFacts& facts);
  template <typename Prepare>
  void tell(CUgraphExec exec, UpdateQueue* behind, Prepare&& prepare) noexcept;
  std::vector<AwaitingGraph> find_untold() noexcept;
  bool tell_each(std::vector<AwaitingGraph>& untold) noexcept;
  void tell_all(Sliced& sliced) noexcept;
  void prepare_update(Sliced& sliced, CUgraph graph, SliceUpdate& told);
  void did_not_follow(Sliced& sliced, const SliceUpdate& told) noexcept;
  bool find_number(Sliced& sliced, CUgraphNode node, std::uint32_t& number);
  bool change_pieces(Sliced& sliced, SliceUpdate& told);
  static void set_numbers(Sliced& sliced, const ReadGraph& read);
  void give_up(Sliced& sliced) noexcept;
  void drop_idle(int idle_looks) noexcept;
  void look_at_times() noexcept;
  bool wants_cutting_again(Sliced& sliced, Sliced::State state);
  void note_whole(Sliced& sliced, graph::WholeReason reason) noexcept;
  bool is_last(const Sliced& sliced, CUstream stream, CUcontext context) const noexcept;
  void note_last(Sliced& sliced, CUstream stream, CUcontext context, bool ordered) noexcept;
  void order(Sliced& sliced, CUstream stream, CUcontext context) noexcept;

  SliceSettings settings_;  // written before the program's first call alone
  std::mutex mutex_;
  std::condition_variable wanted_changed_;
  std::unordered_map<CUgraphExec, std::shared_ptr<Sliced>> all_;
  std::unordered_map<CUgraphExec, std::pair<std::uint64_t, int>> idle_;  // the builder's: launches seen, looks since
  bool watches_ = false;                                                 // the builder's: something may change its mind
  std::mutex driving_;
  std::unordered_map<CUcontext, CUstream> upload_streams_;  // on which nothing else is: under driving_
  std::mutex reading_;                                      // taken after driving_ and Sliced::taken
  std::atomic<int> waiting_to_drive_{0};
  std::atomic<int> unloading_{0};
  std::atomic<bool> wanted_{false};
  std::atomic<bool> stopping_{false};
  bool running_ = false;
  std::atomic<std::uint64_t> streams_ended_{0};
  std::atomic<std::uint64_t> unloads_{0};
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::uint64_t> builds_{0};
  std::atomic<std::uint64_t> build_ns_{0};
  std::atomic<std::uint64_t> dropped_{0};
  std::atomic<bool> children_stay_{false};  // the driver destroys no node inside of a child graph
  std::atomic<graph::WholeReason> failed_{graph::WholeReason::kNone};  // the first of them
  bool said_failed_ = false;                                           // the ticker's
  SpinLock ever_lock_;                                                 // of the next
  std::array<WholeGraphs, graph::kWholeReasons> ever_{};
  std::mutex lately_mutex_;  // of the two below
  std::array<WholeGraphs, graph::kWholeReasons> lately_{};
  std::int64_t lately_ns_ = 0;
};

}  // namespace cudasched::runtime
