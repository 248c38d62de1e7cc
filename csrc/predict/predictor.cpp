#include "predict/predictor.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "predict/features.hpp"
#include "predict/state.hpp"

namespace cudasched::predict {
namespace {

constexpr float kLeastLog = CacheEntry::kLeastLog;
constexpr float kMostLog = CacheEntry::kMostLog;
constexpr float kLeastBaseSpread = 0.06F;  // of corrected estimates around short kernels' times
constexpr float kSpreadWeight = 6;         // samples of a key that weigh as much as kUsualSpread
constexpr float kUsualSpread = 0.02F;      // of repeats
constexpr float kLeastSpread = 0.004F;
constexpr int kMostSteps = 8;

float log_of(std::int64_t duration_ns) noexcept { return std::log(static_cast<float>(duration_ns)); }

}  // namespace

void Predictor::use_trees(const trees::Evaluator* evaluator) {
  const bool fits = evaluator != nullptr && features_apart(evaluator->feature_names(), evaluator->features()).empty();
  trees_ = fits ? evaluator : nullptr;
  said_ = {};
}

Predictor::Place Predictor::place_of(const Query& query) const noexcept {
  Place place;
  place.geometry = Keys::geometry_of(query.launch);
  if (Keys::may_share(query)) {
    place.key = keys_.shared(query, place.geometry);
    place.entry = cache_.peek(place.key);
    place.is_shared = place.entry == nullptr || !place.entry->is_split;
    if (place.is_shared) return place;
    place.split = place.entry;
  }
  place.key = keys_.own(query, place.geometry);
  place.entry = cache_.peek(place.key);
  return place;
}

Prediction Predictor::predict(const Query& query) noexcept {
  const Function* const function = query.function;
  if (function != nullptr && !keys_.words().knows(*function)) {
    corrections_.meet(*function);
    keys_.words().meet(*function, query.words);
  }
  const Place place = place_of(query);
  // For the estimate, or for the outlook.
  if (query.lacks_residency && (place.entry == nullptr || place.entry->is_restored)) [[unlikely]] {
    Prediction none;
    none.wants_residency = true;
    return none;
  }
  Prediction prediction = place.entry != nullptr ? predict_known(query, place) : predict_new(query, place);
  if (place.is_shared && prediction.wants_sample) prediction.own_key = keys_.own(query, place.geometry);
  return prediction;
}

Prediction Predictor::predict_known(const Query& query, const Place& place) noexcept {
  CacheEntry& entry = cache_.use(*place.entry);
  if (entry.is_restored) [[unlikely]]
    meet_again(query, place, entry);
  return answer(entry, true, query.busy);
}

// The first launch of a key that an earlier run has learned.
void Predictor::meet_again(const Query& query, const Place& place, CacheEntry& entry) noexcept {
  entry.is_restored = false;
  outlooks_.add(Keys::shape_of(query, place.geometry), query, static_cast<std::int64_t>(entry.estimate_ns));
}

Prediction Predictor::predict_new(const Query& query, const Place& place) noexcept {
  const Function* const function = query.function;
  // Pointers where there were none before: once more without them.
  if (Keys::has_words(query) && keys_.words().mask_pointers(*function, query.words)) return predict(query);
  if (place.split != nullptr && place.split->words == Keys::tag_of(place.key)) {
    const CacheEntry shared = *place.split;  // which the new one may replace
    CacheEntry& entry = cache_.make(place.key);
    entry.take_over(shared);
    return answer(entry, true, query.busy);
  }
  CacheEntry& entry = cache_.make(place.key);  // first: the trees would evict the entry just found from the caches
  entry.base_log = base_log_of(query);
  entry.function = Corrections::index_of(function);
  entry.persistent = function != nullptr;
  const Prediction prediction = answer(entry, false, query.busy);
  outlooks_.add(Keys::shape_of(query, place.geometry), query, prediction.duration_ns);
  return prediction;
}

float Predictor::base_log_of(const Query& query) const noexcept {
  if (trees_ == nullptr) return log_of(guess_ns(query.launch, query.residency));
  std::array<float, kFeatureCount> row;
  features(query, allocations_, row.data());
  return std::clamp(trees_->margin(row.data()), kLeastLog, kMostLog);
}

std::int64_t Predictor::estimate_ns(const Query& query) noexcept {
  const Place place = place_of(query);
  if (place.entry != nullptr) return static_cast<std::int64_t>(place.entry->estimate_ns);
  NewEstimate& said = said_[(place.key >> 17) % said_.size()];
  if (said.key != place.key) said = {place.key, base_log_of(query)};
  return static_cast<std::int64_t>(
      std::exp(said.base_log + corrections_.log(Corrections::index_of(query.function), said.base_log)));
}

std::int64_t Predictor::graph_ns(const void* graph, std::int64_t critical_path_ns) const noexcept {
  const CacheEntry* const entry = cache_.peek(Keys::of_graph(graph, critical_path_ns));
  if (entry != nullptr) return static_cast<std::int64_t>(entry->estimate_ns);
  if (critical_path_ns <= 0) return 0;
  const float base_log = log_of(critical_path_ns);
  return static_cast<std::int64_t>(std::exp(base_log + corrections_.log(Corrections::kGraphs, base_log)));
}

std::int64_t Predictor::measured_graph_ns(const void* graph, std::int64_t critical_path_ns) const noexcept {
  const CacheEntry* const entry = cache_.peek(Keys::of_graph(graph, critical_path_ns));
  return entry == nullptr || entry->samples < Sampling::kFirst ? 0 : static_cast<std::int64_t>(entry->estimate_ns);
}

Prediction Predictor::predict_graph(const void* graph, std::int64_t critical_path_ns, bool busy) noexcept {
  const std::uint64_t key = Keys::of_graph(graph, critical_path_ns);
  if (CacheEntry* const entry = cache_.find(key)) return answer(*entry, true, busy);
  CacheEntry& entry = cache_.make(key);
  entry.base_log = log_of(critical_path_ns > 0 ? critical_path_ns : kUnknownGraphNs);
  // Times of unknown graphs tell nothing about graphs whose critical path is known.
  entry.function = static_cast<std::uint16_t>(critical_path_ns > 0 ? Corrections::kGraphs : Corrections::kUncorrected);
  return answer(entry, false, busy);
}

void Predictor::refresh(CacheEntry& entry) const noexcept {
  float log = 0;
  if (entry.samples == 0) {
    log = entry.base_log + corrections_.log(entry.function, entry.base_log);
  } else {
    // By the mean over all sizes: the errors nearby include this key's own first sample.
    const float corrected = entry.base_log + corrections_.mean_log(entry.function);
    // The function's suggestion weighs as many samples as it deserves: by the noise of a sample over the suggestion's
    // error. The part of that error that the samples' own noise explains is not counted.
    const auto samples = static_cast<float>(entry.samples);
    const float distance = corrected - entry.measured_log;
    const float noise = noise_ns_ / std::exp(entry.measured_log);
    const float sample_variance = kUsualSpread * kUsualSpread + noise * noise;
    const float base_variance =
        std::max(noise > 0 ? kLeastBaseSpread * kLeastBaseSpread : 0.0F, distance * distance - noise * noise / samples);
    const float weight = sample_variance / (sample_variance + base_variance);
    log = entry.measured_log + weight / (samples + weight) * distance;
  }
  entry.estimate_log = std::clamp(log, kLeastLog, kMostLog);
  entry.estimate_ns = std::max(std::exp(entry.estimate_log), 1.0F);
}

Prediction Predictor::answer(CacheEntry& entry, bool hit, bool busy) noexcept {
  Prediction prediction;
  prediction.key = entry.key;
  prediction.hit = hit;
  prediction.busy = busy;
  prediction.wants_sample = sampling_.wants(entry, bound_, busy);
  ++entry.launches;
  // The bound moves slowly, and its exponential is half of a hit's cost.
  if (prediction.wants_sample || busy || entry.bound_ns == 0 || entry.samples < Sampling::kFirst ||
      entry.launches % kBoundPeriod == 0) {
    estimate(entry, prediction);
  } else {
    prediction.function_index = entry.function;
    prediction.duration_ns = static_cast<std::int64_t>(entry.estimate_ns);
    prediction.bound_ns = static_cast<std::int64_t>(entry.bound_ns);
  }
  return prediction;
}

void Predictor::estimate(CacheEntry& entry, Prediction& prediction) const noexcept {
  if (entry.samples == 0) refresh(entry);
  prediction.is_whole = true;
  prediction.knowledge = entry.samples == 0                 ? Knowledge::kNew
                         : entry.samples < Sampling::kFirst ? Knowledge::kYoung
                                                            : Knowledge::kKnown;
  if (prediction.knowledge == Knowledge::kKnown) {
    const auto samples = static_cast<float>(entry.samples);
    const float spread = (samples * entry.spread + kSpreadWeight * kUsualSpread) / (samples + kSpreadWeight);
    prediction.scale = std::max(spread, kLeastSpread);
  }
  prediction.function_index = entry.function;
  prediction.estimate_log = entry.estimate_log;
  prediction.base_log = entry.base_log;
  prediction.bin = Bound::bin_of(entry.estimate_log);
  prediction.margin = bound_.margin(prediction.knowledge, prediction.busy, prediction.bin, prediction.scale);
  prediction.duration_ns = static_cast<std::int64_t>(entry.estimate_ns);
  // Up: durations come in steps of the device's clock, and a bound is often one of them.
  const float bound_ns = std::ceil(entry.estimate_ns * std::exp(without_noise(prediction.margin, entry.estimate_ns)));
  prediction.bound_ns = static_cast<std::int64_t>(bound_ns);
  prediction.base_ns = prediction.hit ? 0 : static_cast<std::int64_t>(std::exp(entry.base_log));
  if (!prediction.busy) entry.bound_ns = bound_ns;
}

// The rest of a margin that was learned from noisy samples. The noise adds to the spread as squares do; a part stays,
// because a spread has other tails than the noise. For launches that are short beside the noise all of the noise stays:
// their estimates are noisy too. The share was chosen on the sweeps (docs/training.md).
float Predictor::without_noise(float margin, float estimate_ns) const noexcept {
  constexpr float kTail = 1.35F;  // of the noise: its 90% over its standard deviation
  constexpr float kRemoved = 0.4F;
  constexpr float kNoneBelow = 3;  // estimate over noise
  constexpr float kAllAbove = 6;
  if (noise_ns_ <= 0) return margin;
  const float times = estimate_ns / noise_ns_;
  const float removed = kRemoved * std::clamp((times - kNoneBelow) / (kAllAbove - kNoneBelow), 0.0F, 1.0F);
  const float least = (1 - removed) * margin;
  return std::sqrt(std::max(margin * margin - removed * (kTail * kTail) / (times * times), least * least));
}

void Predictor::learn(const Prediction& prediction, const Sample& sample, bool overlapped) noexcept {
  if (prediction.key == 0) return;
  noise_ns_ = sample.noise_ns;
  if (prediction.is_whole) {
    bound_.add(prediction.knowledge, prediction.busy || overlapped, prediction.bin, prediction.scale,
               sample.log() - prediction.estimate_log, sample.log() - prediction.estimate_log > prediction.margin);
  }
  if (overlapped) return;
  CacheEntry* const entry = cache_.find(prediction.key);
  const std::uint32_t function = prediction.function_index;
  // A key that fell out of the cache was known once, but its state then is lost.
  if (prediction.is_whole && (entry == nullptr || entry->samples == 0)) {
    corrections_.add(function, prediction.base_log, sample.log_over(prediction.base_log),
                     sample.noise_of(std::exp(prediction.estimate_log)));
  }
  if (entry == nullptr || entry->is_split) return;
  if (prediction.own_key != 0) sampling_.answered();
  if (prediction.own_key != 0 && !entry->agrees(Keys::tag_of(prediction.own_key), sample)) {
    // This entry will be used if the key is split.
    CacheEntry* own = cache_.find(prediction.own_key);
    if (own == nullptr) {
      own = &cache_.make(prediction.own_key);
      own->base_log = prediction.base_log;
      own->function = static_cast<std::uint16_t>(function);
      own->persistent = true;
    }
    ++own->launches;
    own->add(sample);
    refresh(*own);
    return;
  }
  entry->add(sample);
  refresh(*entry);
  entry->bound_ns = 0;
}

void Predictor::observe_at_least(const Prediction& prediction, std::int64_t ran_ns) noexcept {
  if (ran_ns <= 0 || prediction.key == 0) return;
  CacheEntry* const entry = cache_.find(prediction.key);
  if (entry == nullptr || entry->samples > 0 || entry->is_split) return;
  const float ran_log = std::min(log_of(ran_ns), kMostLog);
  if (ran_log <= entry->estimate_log) return;
  // Launches as long as that are corrected in another way, so that one step may not get there.
  entry->base_log = std::clamp(ran_log - corrections_.log(entry->function, entry->base_log), kLeastLog, kMostLog);
  for (int step = 0; step < kMostSteps; ++step) {
    const float missing = ran_log - entry->base_log - corrections_.log(entry->function, entry->base_log);
    if (missing <= 0) break;
    entry->base_log = std::min(entry->base_log + missing, kMostLog);
  }
  refresh(*entry);
  entry->bound_ns = 0;
}

std::uint64_t Predictor::base_identity() const noexcept { return trees_ != nullptr ? trees_->identity() : 0; }

std::vector<std::byte> Predictor::save() const {
  StateWriter out;
  out.put(base_identity());
  corrections_.save(out);
  cache_.save(out);
  bound_.save(out);
  return std::move(out).finish();
}

void Predictor::restore(std::span<const std::byte> state) {
  StateReader in(state);
  // Another model's errors tell nothing about this one.
  const bool same_base = in.take<std::uint64_t>("model") == base_identity();
  const auto corrections = std::make_unique<Corrections>();
  const auto cache = std::make_unique<Cache>();
  const auto bound = std::make_unique<Bound>(bound_.coverage());
  corrections->restore(in, same_base);
  // The keys' first samples are taken; the next comes when this run's launches have gone round once.
  cache->restore(in, Sampling::kFirst, Corrections::kNameless);
  bound->restore(in, same_base);
  in.finish();

  corrections_ = std::move(*corrections);
  cache_ = *cache;
  bound_ = *bound;
}

std::int64_t Predictor::guess_ns(const Launch& launch, const Residency& residency) noexcept {
  const std::uint64_t resident =
      std::max<std::uint64_t>(1, static_cast<std::uint64_t>(std::max(residency.blocks_per_sm, 1)) *
                                     static_cast<std::uint64_t>(std::max(residency.sm_count, 1)));
  const std::uint64_t waves = std::max<std::uint64_t>(1, (launch.blocks() + resident - 1) / resident);
  // Beyond a million waves a guess is as good as any other; the bound keeps the product in range.
  return kShortestNs + static_cast<std::int64_t>(std::min<std::uint64_t>(waves, 1'000'000)) * kWaveNs;
}

}  // namespace cudasched::predict
