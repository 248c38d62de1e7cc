// How long will this launch take, and which time will it hardly exceed? The one interface that the scheduler knows.
//
// Keys (keys.hpp) say which launches have a history in common. A key that was launched before: the durations of its
// launches (cache.hpp). A new one: the trees, or without trees occupancy and waves, times the errors of such estimates
// so far (corrections.hpp). A graph: its critical path or kUnknownGraphNs, corrected alike, then as one launch with a
// key of its own. A set share of launches stays within the bound (bound.hpp).
//
// Where the differing words of a shared key's launches change the duration, the key is split. From then on these
// launches go by all words that matter, and keep their history.
//
// The predictor also says which launches are worth timing (sampling.hpp). A sample that overlapped other work goes to
// the bound of busy launches alone. Each part writes and reads the state that is worth keeping between runs
// (state.hpp).
//
// Not thread-safe: the caller (gate or launcher) holds a lock. predict(), predict_graph() and observe() allocate
// nothing and make no system call. About 2 MiB: not for a thread's stack.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "predict/allocations.hpp"
#include "predict/bound.hpp"
#include "predict/cache.hpp"
#include "predict/corrections.hpp"
#include "predict/keys.hpp"
#include "predict/launch.hpp"
#include "predict/outlook.hpp"
#include "predict/sample.hpp"
#include "predict/sampling.hpp"
#include "predict/trees/evaluator.hpp"

namespace cudasched::predict {

struct Prediction {
  std::int64_t duration_ns = 0;  // the estimate
  std::int64_t bound_ns = 0;     // upper bound with the set coverage; >= duration_ns
  std::uint64_t key = 0;         // never 0
  std::int64_t base_ns = 0;      // the estimate by trees, critical path or guess, before correction
  bool wants_sample = false;     // time this launch
  bool hit = false;              // the key was known
  bool busy = false;             // as asked
  bool wants_residency = false;  // no prediction: the query lacks the residency, which is needed here

  // For observe() alone.
  bool is_whole = false;  // the following fields are set
  Knowledge knowledge = Knowledge::kNew;
  std::uint8_t bin = 0;
  std::uint32_t function_index = 0;
  std::uint64_t own_key = 0;  // of a launch with a shared key: the key that its words would give
  float estimate_log = 0;
  float base_log = 0;
  float margin = 0;
  float scale = 1;
};

class Predictor {
 public:
  static constexpr std::uint32_t kBoundPeriod = 8;  // launches of a known key between two looks at its bound
  static constexpr std::int64_t kUnknownGraphNs = 200'000;
  static constexpr std::int64_t kShortestNs = 2'000;  // a kernel that does nothing
  static constexpr std::int64_t kWaveNs = 6'000;      // a wave of a middling kernel

  Predictor() noexcept : Predictor(kDefaultCoverage) {}  // history and occupancy guess only
  explicit Predictor(float coverage) noexcept : bound_(coverage) {}

  // Must outlive the predictor; null: none. Trees whose features differ from features.hpp are not used. Before
  // launches.
  void use_trees(const trees::Evaluator* evaluator);

  // Must outlive the predictor; null: a word that looks like an address is a pointer.
  void use_allocations(const Allocations* allocations) noexcept {
    allocations_ = allocations;
    keys_.words().use_allocations(allocations);
  }

  const Words& words() const noexcept { return keys_.words(); }

  // Of the kernels that were new in this run, and of those known from earlier runs at their first launch. Another
  // thread may read the sums.
  const Outlooks& outlooks() const noexcept { return outlooks_; }

  // Counts a launch, unless the answer is that it wants the residency.
  Prediction predict(const Query& query) noexcept;

  // The answer of predict() without counting a launch, for a graph's kernels. The trees' estimates of new keys are
  // kept, because graphs have many nodes of few keys, and are instantiated again.
  std::int64_t estimate_ns(const Query& query) noexcept;

  // `critical_path_ns` is 0 where it is unknown.
  Prediction predict_graph(const void* graph, std::int64_t critical_path_ns, bool busy) noexcept;

  // The duration of predict_graph() without counting a launch; 0: neither the graph nor its critical path is known.
  std::int64_t graph_ns(const void* graph, std::int64_t critical_path_ns) const noexcept;

  // The measured time of the graph's launches; 0: too few samples.
  std::int64_t measured_graph_ns(const void* graph, std::int64_t critical_path_ns) const noexcept;

  // A launch took `duration_ns`, predicted by `prediction`.
  void observe(const Prediction& prediction, std::int64_t duration_ns, bool overlapped) noexcept {
    if (duration_ns > 0) learn(prediction, {static_cast<float>(duration_ns), 0}, overlapped);
  }

  // The same for a launch between two timing events. Returns the launch's time by these.
  std::int64_t observe_elapsed(const Prediction& prediction, const Elapsed& elapsed, bool overlapped) noexcept {
    const Sample sample = event_sample(elapsed);
    if (elapsed.ns > 0) learn(prediction, sample, overlapped);
    return static_cast<std::int64_t>(sample.ns);
  }

  // A launch has run for `ran_ns` and is not complete: that is its least time. For a key without a sample, whose
  // estimate may be far too short; a measured one stays.
  void observe_at_least(const Prediction& prediction, std::int64_t ran_ns) noexcept;

  // The state worth keeping between runs, at most kMaxStateBytes.
  std::vector<std::byte> save() const;

  // Throws StateError on a corrupt or foreign state, and changes nothing then. Otherwise replaces the learned state.
  // Before the first launch, after use_trees(): the errors of other estimates are not taken over.
  void restore(std::span<const std::byte> state);

  static std::int64_t guess_ns(const Launch& launch, const Residency& residency) noexcept;

 private:
  // Where a launch's history is.
  struct Place {
    std::uint64_t geometry = 0;
    std::uint64_t key = 0;              // never 0
    const CacheEntry* entry = nullptr;  // null: there is none yet
    bool is_shared = false;
    const CacheEntry* split = nullptr;  // the launch's shared key until the split
  };

  // The estimate of a new key without a launch.
  struct NewEstimate {
    std::uint64_t key = 0;  // 0: none
    float base_log = 0;
  };

  void learn(const Prediction& prediction, const Sample& sample, bool overlapped) noexcept;
  Place place_of(const Query& query) const noexcept;
  Prediction predict_known(const Query& query, const Place& place) noexcept;
  Prediction predict_new(const Query& query, const Place& place) noexcept;
  [[gnu::noinline]] void meet_again(const Query& query, const Place& place, CacheEntry& entry) noexcept;
  std::uint64_t base_identity() const noexcept;  // of the trees that estimate new keys; 0: none
  float base_log_of(const Query& query) const noexcept;
  void refresh(CacheEntry& entry) const noexcept;
  Prediction answer(CacheEntry& entry, bool hit, bool busy) noexcept;
  void estimate(CacheEntry& entry, Prediction& prediction) const noexcept;
  float without_noise(float margin, float estimate_ns) const noexcept;

  const trees::Evaluator* trees_ = nullptr;
  const Allocations* allocations_ = nullptr;
  float noise_ns_ = 0;                    // of the samples
  std::array<NewEstimate, 1024> said_{};  // each key has one place
  Keys keys_;
  Cache cache_;
  Corrections corrections_;
  Bound bound_;
  Sampling sampling_;
  Outlooks outlooks_;
};

}  // namespace cudasched::predict
