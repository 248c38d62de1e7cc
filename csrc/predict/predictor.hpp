// How long will this launch take, and what will it hardly exceed? The one interface that the scheduler knows.
//
// Keys (keys.hpp) say which launches have a history in common. A key that was launched before: what its launches lasted
// (cache.hpp). A new one: the trees, or without them occupancy and waves, times what such estimates were wrong by so
// far (corrections.hpp). A graph: its critical path or kUnknownGraphNs, corrected alike, then as one launch with a key
// of its own. The bound holds with a set share (bound.hpp).
//
// Where words that launches of a shared key differ in do change the duration the key is split: from then on these
// launches go by all words that matter, and keep what they have learned.
//
// The predictor also says which launches are worth timing (sampling.hpp). A sample that overlapped other work tells the
// bound of busy launches and nothing else. Each part writes what is worth keeping between runs and reads it
// (state.hpp).
//
// Not thread-safe: the caller (gate or launcher) holds a lock. predict(), predict_graph(), observe() and
// wants_residency() allocate nothing and make no system call. About 2 MiB: not for a thread's stack.
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
  std::int64_t base_ns = 0;      // what trees, critical path or guess said before correction
  bool wants_sample = false;     // time this launch
  bool hit = false;              // the key was known
  bool busy = false;             // as asked

  // For observe() alone.
  bool is_whole = false;  // what follows is set
  Knowledge knowledge = Knowledge::kNew;
  std::uint8_t bin = 0;
  std::uint32_t function_index = 0;
  std::uint64_t own_key = 0;  // of a launch with a shared key: the one that its words would give it
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

  // Must outlive this; null: none. Trees of other features than features.hpp has are not used. Before launches.
  void use_trees(const trees::Evaluator* evaluator);

  // Must outlive this; null: what looks like an address is a pointer.
  void use_allocations(const Allocations* allocations) noexcept {
    allocations_ = allocations;
    keys_.words().use_allocations(allocations);
  }

  const Words& words() const noexcept { return keys_.words(); }

  // Of the kernels that were new in this run, and of those that are known from earlier runs at their first launch.
  // Another thread may read its sums.
  const Outlooks& outlooks() const noexcept { return outlooks_; }

  Prediction predict(const Query& query) noexcept;

  // What predict() would say of a launch, said without counting one: of a graph's kernels. What the trees said of new
  // keys is kept, because graphs have many nodes of few keys, and are instantiated again.
  std::int64_t estimate_ns(const Query& query) noexcept;

  // `critical_path_ns` is 0 where it is unknown.
  Prediction predict_graph(const void* graph, std::int64_t critical_path_ns, bool busy) noexcept;

  // What launches of it took, once there are a few samples; 0: there are not.
  std::int64_t measured_graph_ns(const void* graph, std::int64_t critical_path_ns) const noexcept;

  // A launch took `duration_ns`; `prediction` is what was said of it.
  void observe(const Prediction& prediction, std::int64_t duration_ns, bool overlapped) noexcept {
    if (duration_ns > 0) learn(prediction, {static_cast<float>(duration_ns), 0}, overlapped);
  }

  // The same of a launch between two timing events. What it took by these.
  std::int64_t observe_elapsed(const Prediction& prediction, const Elapsed& elapsed, bool overlapped) noexcept {
    const Sample sample = event_sample(elapsed);
    if (elapsed.ns > 0) learn(prediction, sample, overlapped);
    return static_cast<std::int64_t>(sample.ns);
  }

  // A launch has run for `ran_ns` and is not complete: it takes at least that. For a key that has no sample yet, whose
  // estimate may be far too short; a measured one stands.
  void observe_at_least(const Prediction& prediction, std::int64_t ran_ns) noexcept;

  // Would predict() need query.residency, for the estimate or the outlook?
  bool wants_residency(const Launch& launch, const Function* function,
                       std::span<const std::uint32_t> words) const noexcept;

  // What is worth keeping between runs, at most kMaxStateBytes.
  std::vector<std::byte> save() const;

  // Throws StateError on a corrupt or foreign state; changes nothing then. Otherwise what was learned is replaced.
  // Before the first launch, after use_trees(): what other estimates were wrong by is not taken over.
  void restore(std::span<const std::byte> state);

  static std::int64_t guess_ns(const Launch& launch, const Residency& residency) noexcept;

 private:
  // Where a launch's history is.
  struct Place {
    std::uint64_t geometry = 0;
    std::uint64_t key = 0;              // never 0
    const CacheEntry* entry = nullptr;  // null: there is none yet
    bool is_shared = false;
    const CacheEntry* split = nullptr;  // the key that the launch shared until it was split
  };

  // What was said of a new key without a launch.
  struct Said {
    std::uint64_t key = 0;  // 0: none
    float base_log = 0;
  };

  void learn(const Prediction& prediction, const Sample& sample, bool overlapped) noexcept;
  Place place_of(const Query& query) const noexcept;
  Prediction predict_known(const Query& query, const Place& place) noexcept;
  Prediction predict_new(const Query& query, const Place& place) noexcept;
  [[gnu::noinline]] void meet_again(const Query& query, const Place& place, CacheEntry& entry) noexcept;
  std::uint64_t base_identity() const noexcept;  // of what estimates new keys; 0: no trees
  float base_log_of(const Query& query) const noexcept;
  void refresh(CacheEntry& entry) const noexcept;
  Prediction answer(CacheEntry& entry, bool hit, bool busy) noexcept;
  void estimate(CacheEntry& entry, Prediction& prediction) const noexcept;
  float without_noise(float margin, float estimate_ns) const noexcept;

  const trees::Evaluator* trees_ = nullptr;
  const Allocations* allocations_ = nullptr;
  float noise_ns_ = 0;             // of the samples
  std::array<Said, 1024> said_{};  // each key has one place
  Keys keys_;
  Cache cache_;
  Corrections corrections_;
  Bound bound_;
  Sampling sampling_;
  Outlooks outlooks_;
};

}  // namespace cudasched::predict
