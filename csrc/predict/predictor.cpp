#include "predict/predictor.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "base/hash.hpp"
#include "predict/features.hpp"
#include "predict/state.hpp"
#include "predict/work.hpp"

namespace cudasched::predict {
namespace {

constexpr float kLeastLog = 0;             // 1 ns
constexpr float kMostLog = 32;             // 22 hours
constexpr float kMostRatio = 4;            // log(measured / base): 55 times
constexpr float kLibraryWeight = 2;        // samples of a function that weigh as much as its library
constexpr float kLeastBaseSpread = 0.06F;  // of corrected estimates about what short kernels last
constexpr float kSpreadWeight = 6;         // samples of a key that weigh as much as kUsualSpread
constexpr float kUsualSpread = 0.02F;      // of repeats
constexpr float kLeastSpread = 0.004F;
constexpr float kFunctionStep = 0.05F;
constexpr float kMostScore = 10'000;
constexpr int kMostSteps = 8;
constexpr std::uint32_t kMostSamples = 1'000'000;  // that are counted of a correction

float log_of(std::int64_t duration_ns) noexcept { return std::log(static_cast<float>(duration_ns)); }

std::uint64_t pair(std::uint32_t a, std::uint32_t b) noexcept { return std::uint64_t{a} << 32 | b; }

std::uint64_t finished(std::uint64_t key) noexcept {
  key ^= key >> 32;
  return key == 0 ? 1 : key;
}

// What a shared key remembers of the key that the words would give.
std::uint16_t tag_of(std::uint64_t own_key) noexcept { return static_cast<std::uint16_t>(own_key | 1); }

// Whether the kernel's work shows in its geometry; see the header. A tile in its name speaks of a matrix product.
bool may_share(const NameTraits& traits) noexcept {
  switch (static_cast<Family>(traits.family)) {
    case Family::kElementwise:
    case Family::kIndex:
    case Family::kCopy:
    case Family::kMemory:
      return traits.tile[0] == 0;
    default:
      return false;
  }
}

// Independent products, so that the processor need not wait from one word to the next.
std::uint64_t geometry_of(const Launch& launch) noexcept {
  const std::uint64_t words[] = {pair(launch.grid[0], launch.grid[1]), pair(launch.grid[2], launch.block[0]),
                                 pair(launch.block[1], launch.block[2]), pair(launch.cluster[0], launch.cluster[1]),
                                 pair(launch.cluster[2], launch.dynamic_shared_bytes)};
  std::uint64_t sum = 0;
  std::uint64_t seed = 1;
  for (const std::uint64_t word : words) sum += mix(seed++ * 0xd6e8'feb8'6659'fd93ULL, word);
  return sum;
}

}  // namespace

void Predictor::use_trees(const trees::Evaluator* evaluator) {
  const bool fits = evaluator != nullptr && features_apart(evaluator->feature_names(), evaluator->features()).empty();
  trees_ = fits ? evaluator : nullptr;
}

Predictor::Place Predictor::place_of(const Query& query) const noexcept {
  Place place;
  place.geometry = geometry_of(query.launch);
  if (has_words(query) && may_share(query.function->traits)) {
    place.key =
        finished(mix(mix(query.function->identity, place.geometry), words_.first(*query.function, query.words)));
    place.entry = cache_.peek(place.key);
    place.is_shared = place.entry == nullptr || !place.entry->is_split;
    if (place.is_shared) return place;
    place.split = place.entry;
  }
  place.key = own_key_of(query, place.geometry);
  place.entry = cache_.peek(place.key);
  return place;
}

std::uint64_t Predictor::shape_of(const Query& query, std::uint64_t geometry) noexcept {
  const std::uint64_t identity =
      query.function != nullptr ? query.function->identity : reinterpret_cast<std::uintptr_t>(query.launch.function);
  return mix(identity, geometry);
}

std::uint64_t Predictor::own_key_of(const Query& query, std::uint64_t geometry) const noexcept {
  const std::uint64_t kernel = shape_of(query, geometry);
  if (!has_words(query)) return finished(kernel);
  const std::uint64_t work = work_key(query.function->traits.layout, query.words, query.launch.blocks());
  return finished(mix(kernel, work != 0 ? work : words_.sum(*query.function, query.words)));
}

void Predictor::meet(const Function& function, std::span<const std::uint32_t> words) noexcept {
  if (function.index < kMaxFunctions && corrections_[function.index].identity == 0) {
    const auto saved = std::lower_bound(
        saved_.begin(), saved_.end(), function.identity,
        [](const Correction& correction, std::uint64_t identity) { return correction.identity < identity; });
    const bool known = saved != saved_.end() && saved->identity == function.identity;
    Correction& correction = corrections_[function.index];
    correction = known ? *saved : Correction{function.identity};
    correction.library = libraries_.find(function.traits.library);
  }
  words_.meet(function, words);
}

Prediction Predictor::predict(const Query& query) noexcept {
  const Function* const function = query.function;
  if (function != nullptr && !words_.knows(*function)) meet(*function, query.words);
  const Place place = place_of(query);
  Prediction prediction = place.entry != nullptr ? predict_known(query, place) : predict_new(query, place);
  if (place.is_shared && prediction.wants_sample) prediction.own_key = own_key_of(query, place.geometry);
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
  outlooks_.add(shape_of(query, place.geometry), query, static_cast<std::int64_t>(entry.estimate_ns));
}

Prediction Predictor::predict_new(const Query& query, const Place& place) noexcept {
  const Function* const function = query.function;
  // Pointers where there were none before: once more without them.
  if (has_words(query) && words_.mask_pointers(*function, query.words)) return predict(query);
  if (place.split != nullptr && place.split->words == tag_of(place.key)) {
    const CacheEntry shared = *place.split;  // which the new one may replace
    CacheEntry& entry = cache_.make(place.key);
    entry.take_over(shared);
    return answer(entry, true, query.busy);
  }
  const float base_log = base_log_of(query);
  CacheEntry& entry = cache_.make(place.key);
  entry.base_log = base_log;
  entry.function = correction_of(function);
  entry.persistent = function != nullptr;
  const Prediction prediction = answer(entry, false, query.busy);
  outlooks_.add(shape_of(query, place.geometry), query, prediction.duration_ns);
  return prediction;
}

std::uint16_t Predictor::correction_of(const Function* function) noexcept {
  return static_cast<std::uint16_t>(function != nullptr && function->index < kMaxFunctions ? function->index
                                                                                           : kNameless);
}

float Predictor::base_log_of(const Query& query) const noexcept {
  if (trees_ == nullptr) return log_of(guess_ns(query.launch, query.residency));
  std::array<float, kFeatureCount> row;
  features(query, allocations_, row.data());
  return std::clamp(trees_->margin(row.data()), kLeastLog, kMostLog);
}

std::int64_t Predictor::estimate_ns(const Query& query) const noexcept {
  const CacheEntry* const entry = place_of(query).entry;
  if (entry != nullptr) return static_cast<std::int64_t>(std::exp(entry->estimate_log));
  const float base_log = base_log_of(query);
  return static_cast<std::int64_t>(std::exp(base_log + correction_log(correction_of(query.function), base_log)));
}

std::uint64_t Predictor::key_of_graph(const void* graph, std::int64_t critical_path_ns) noexcept {
  constexpr std::uint64_t kGraphSeed = 0x6772'6170'6873ULL;
  return mix(mix(kGraphSeed, reinterpret_cast<std::uintptr_t>(graph)), static_cast<std::uint64_t>(critical_path_ns)) |
         1;
}

std::int64_t Predictor::measured_graph_ns(const void* graph, std::int64_t critical_path_ns) const noexcept {
  const CacheEntry* const entry = cache_.peek(key_of_graph(graph, critical_path_ns));
  if (entry == nullptr || entry->samples < kFirstSamples) return 0;
  return static_cast<std::int64_t>(std::exp(entry->estimate_log));
}

Prediction Predictor::predict_graph(const void* graph, std::int64_t critical_path_ns, bool busy) noexcept {
  const std::uint64_t key = key_of_graph(graph, critical_path_ns);
  if (CacheEntry* const entry = cache_.find(key)) return answer(*entry, true, busy);
  CacheEntry& entry = cache_.make(key);
  entry.base_log = log_of(critical_path_ns > 0 ? critical_path_ns : kUnknownGraphNs);
  // What unknown graphs last says nothing of those whose critical path is known.
  entry.function = static_cast<std::uint16_t>(critical_path_ns > 0 ? kGraphs : kUncorrected);
  return answer(entry, false, busy);
}

float Predictor::mean_correction_log(std::uint32_t function_index) const noexcept {
  if (function_index == kUncorrected) return 0;
  const Correction& own = corrections_[function_index];
  const auto samples = static_cast<float>(own.samples);
  return (samples * own.log_ratio + kLibraryWeight * libraries_.shrunk(own.library)) / (samples + kLibraryWeight);
}

// Of a launch without a sample of its own.
float Predictor::correction_log(std::uint32_t function_index, float base_log) const noexcept {
  const float mean = mean_correction_log(function_index);
  return function_index < kMaxFunctions ? nearby_.about(function_index, base_log, mean) : mean;
}

void Predictor::refresh(CacheEntry& entry) const noexcept {
  float log = 0;
  if (entry.samples == 0) {
    log = entry.base_log + correction_log(entry.function, entry.base_log);
  } else {
    // By the mean over all sizes: what is known of launches nearby has this key's own first sample in it.
    const float corrected = entry.base_log + mean_correction_log(entry.function);
    // What the function suggests weighs as many samples as it deserves: by the noise of a sample over what the
    // suggestion is off by, of which what the samples' own noise explains is not counted.
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
  prediction.wants_sample = entry.launches < kFirstSamples || settles(entry) || draw(entry, busy);
  ++entry.launches;
  // The bound moves slowly, and its exponential is half of what a hit costs.
  if (prediction.wants_sample || busy || entry.bound_ns == 0 || entry.samples < kFirstSamples ||
      entry.launches % kBoundPeriod == 0) {
    estimate(entry, prediction);
  } else {
    prediction.function_index = entry.function;
    prediction.duration_ns = static_cast<std::int64_t>(entry.estimate_ns);
    prediction.bound_ns = static_cast<std::int64_t>(entry.bound_ns);
  }
  return prediction;
}

// Whether the launch is timed to settle a doubt; not where such requests stay without an answer.
bool Predictor::settles(const CacheEntry& entry) noexcept {
  if (entry.doubts == 0 || entry.is_split || unanswered_ == kMostUnanswered) return false;
  ++unanswered_;
  return true;
}

// Whatever the key, with the same chance within a group of the bound, so that what the group learns is true of it.
bool Predictor::draw(const CacheEntry& entry, bool busy) noexcept {
  constexpr std::uint64_t kAll = std::uint64_t{1} << 32;
  draw_ = draw_ * 1'664'525 + 1'013'904'223;
  if (draw_ >= kAll / kEarlyPeriod) return false;
  if (draw_ < kAll / kSamplePeriod) return true;
  // Where nothing can be measured the bound stays as it is, and asking more would be in vain.
  if (early_draws_ == kMostEarlyDraws) return false;
  if (!bound_.is_young(Knowledge::kKnown, busy, Bound::bin_of(entry.estimate_log))) return false;
  ++early_draws_;
  return true;
}

void Predictor::estimate(CacheEntry& entry, Prediction& prediction) const noexcept {
  if (entry.samples == 0) refresh(entry);
  prediction.is_whole = true;
  prediction.knowledge = entry.samples == 0              ? Knowledge::kNew
                         : entry.samples < kFirstSamples ? Knowledge::kYoung
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

// What is left of a margin that was learned from noisy samples. The noise adds to the spread as squares do; some of it
// stays, because a spread has longer tails than the noise, which is a tick at most. Of launches of a few ticks all of
// it stays: their estimates are noisy too. Both were chosen on the sweeps (docs/training.md).
float Predictor::without_noise(float margin, float estimate_ns) const noexcept {
  constexpr float kTail = 1.35F;  // of the difference of two rounded times: its 90% over its standard deviation
  constexpr float kRemoved = 0.4F;
  constexpr float kNoneBelow = 7.5F;  // estimate over noise
  constexpr float kAllAbove = 12.5F;
  if (noise_ns_ <= 0) return margin;
  const float times = estimate_ns / noise_ns_;
  const float removed = kRemoved * std::clamp((times - kNoneBelow) / (kAllAbove - kNoneBelow), 0.0F, 1.0F);
  const float least = (1 - removed) * margin;
  return std::sqrt(std::max(margin * margin - removed * (kTail * kTail) / (times * times), least * least));
}

void Predictor::Correction::add(float log, float least_step) noexcept {
  const float step = std::max(1.0F / static_cast<float>(samples + 1), least_step);
  // One interrupted sample does not carry the mean away.
  const float most = samples < 3 ? kMostRatio : 1.0F;
  log_ratio += step * std::clamp(log - log_ratio, -most, most);
  if (samples < kMostSamples) ++samples;
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
  // A key that fell out of the cache was known once; nothing is known of what it was then.
  if (prediction.is_whole && function != kUncorrected && (entry == nullptr || entry->samples == 0)) {
    const float ratio = std::clamp(sample.log_over(prediction.base_log), -kMostRatio, kMostRatio);
    Correction& correction = corrections_[function];
    if (correction.samples == 0) {
      if (Library* const library = libraries_.at(correction.library)) library->add(ratio);
    }
    correction.add(ratio, kFunctionStep);
    if (function < kMaxFunctions) nearby_.add(function, prediction.base_log, ratio);
  }
  if (entry == nullptr || entry->is_split) return;
  if (prediction.own_key != 0) unanswered_ = 0;
  if (prediction.own_key != 0 && !entry->agrees(tag_of(prediction.own_key), sample)) {
    // It will be asked for if the key is split.
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
  entry->base_log = std::clamp(ran_log - correction_log(entry->function, entry->base_log), kLeastLog, kMostLog);
  for (int step = 0; step < kMostSteps; ++step) {
    const float missing = ran_log - entry->base_log - correction_log(entry->function, entry->base_log);
    if (missing <= 0) break;
    entry->base_log = std::min(entry->base_log + missing, kMostLog);
  }
  refresh(*entry);
  entry->bound_ns = 0;
}

bool Predictor::wants_residency(const Launch& launch, const Function* function,
                                std::span<const std::uint32_t> words) const noexcept {
  if (launch.is_graph) return false;
  const CacheEntry* const entry = place_of({launch, function, words, {}, false}).entry;
  return entry == nullptr || entry->is_restored;
}

std::uint64_t Predictor::base_identity() const noexcept { return trees_ != nullptr ? trees_->identity() : 0; }

std::vector<std::byte> Predictor::save() const {
  StateWriter out;
  out.put(base_identity());
  const Correction& graphs = corrections_[kGraphs];
  out.put(graphs.samples);
  out.put(graphs.log_ratio);

  std::vector<Correction> functions;
  for (std::uint32_t index = 0; index < kMaxFunctions; ++index) {
    if (corrections_[index].identity != 0 && corrections_[index].samples != 0) functions.push_back(corrections_[index]);
  }
  const auto by_identity = [](const Correction& a, const Correction& b) { return a.identity < b.identity; };
  std::sort(functions.begin(), functions.end(), by_identity);
  const std::size_t met = functions.size();
  for (const Correction& earlier : saved_) {
    if (functions.size() == kMaxFunctions) break;
    const auto end = functions.begin() + static_cast<std::ptrdiff_t>(met);
    if (!std::binary_search(functions.begin(), end, earlier, by_identity)) functions.push_back(earlier);
  }
  out.put(static_cast<std::uint32_t>(functions.size()));
  for (const Correction& function : functions) {
    out.put(function.identity);
    out.put(function.samples);
    out.put(function.log_ratio);
  }

  for (const Library& library : libraries_.all()) {
    out.put(library.name);
    out.put(library.count);
    out.put(library.mean);
    out.put(library.variance);
  }

  std::uint32_t count = 0;
  const auto is_kept = [](const CacheEntry& entry) {
    return entry.persistent && (entry.samples > 0 || entry.is_split);
  };
  for (const CacheEntry& entry : cache_.entries()) count += is_kept(entry) ? 1 : 0;
  out.put(count);
  for (const CacheEntry& entry : cache_.entries()) {
    if (!is_kept(entry)) continue;
    out.put(entry.key);
    out.put(entry.is_split ? 0U : entry.samples);
    out.put(entry.measured_log);
    out.put(entry.base_log);
    out.put(entry.spread);
  }

  for (const ScoreWindow& window : bound_.groups()) {
    out.put(window.shift());
    out.put(static_cast<std::uint32_t>(window.size()));
    for (std::size_t age = window.size(); age-- > 0;) out.put(window.score(age));
  }
  return std::move(out).finish();
}

void Predictor::restore(std::span<const std::byte> state) {
  StateReader in(state);
  // What another model was wrong by says nothing of this one.
  const bool same_base = in.take<std::uint64_t>("model") == base_identity();
  const auto take_correction = [&](Correction& correction) {
    correction.samples = in.take<std::uint32_t>("number of samples", kMostSamples);
    correction.log_ratio = in.take_real("correction", -kMostRatio, kMostRatio);
  };
  Correction graphs;
  take_correction(graphs);

  std::vector<Correction> functions(in.take<std::uint32_t>("number of functions", kMaxFunctions));
  for (Correction& function : functions) {
    function.identity = in.take<std::uint64_t>("identity");
    take_correction(function);
    if (!same_base) function = Correction{function.identity};
  }
  std::sort(functions.begin(), functions.end(),
            [](const Correction& a, const Correction& b) { return a.identity < b.identity; });

  Libraries libraries;
  for (std::size_t left = Libraries::kMost; left > 0; --left) {
    const auto name = in.take<std::uint32_t>("library");
    const auto count = in.take<std::uint32_t>("number of kernels", Library::kMostCount);
    const float mean = in.take_real("correction", -kMostRatio, kMostRatio);
    const float variance = in.take_real("variance", 0, 4 * kMostRatio * kMostRatio);
    Library* const library = name != 0 && same_base ? libraries.at(libraries.find(name)) : nullptr;
    if (library != nullptr) *library = {name, count, mean, variance};
  }

  const auto cache = std::make_unique<Cache>();
  for (auto left = in.take<std::uint32_t>("number of keys", Cache::kCapacity); left > 0; --left) {
    const auto key = in.take<std::uint64_t>("key");
    CacheEntry* const known = key != 0 ? cache->find(key) : nullptr;
    CacheEntry& entry = known != nullptr ? *known : cache->make(key);
    entry.samples = in.take<std::uint32_t>("number of samples", ~std::uint32_t{0});
    entry.measured_log = in.take_real("duration", kLeastLog, kMostLog);
    entry.base_log = in.take_real("estimate", kLeastLog, kMostLog);
    entry.spread = in.take_real("spread", 0, CacheEntry::kOutlierLog);
    entry.first_logs.fill(entry.measured_log);
    // Its first samples are taken; the next comes when this run's launches have gone round once.
    entry.launches = kFirstSamples;
    entry.function = kNameless;
    entry.persistent = true;
    entry.is_restored = true;
    entry.is_split = entry.samples == 0;
    entry.estimate_log = entry.measured_log;
    entry.estimate_ns = std::exp(entry.measured_log);
  }

  const auto bound = std::make_unique<Bound>(bound_.coverage());
  for (std::size_t group = 0; group < bound->groups().size(); ++group) {
    ScoreWindow& window = bound->groups()[group];
    const float shift = in.take_real("level of a bound", -1, 1);
    const auto scores = in.take<std::uint32_t>("number of scores", ScoreWindow::kWindow);
    for (std::uint32_t i = 0; i < scores; ++i) {
      const float score = in.take_real("score", -kMostScore, kMostScore);
      if (same_base || !Bound::is_of_new(group)) window.add(score, false, bound_.coverage());
    }
    window.set_shift(shift);
  }
  in.finish();

  cache_ = *cache;
  bound_ = *bound;
  libraries_ = libraries;
  nearby_.clear();
  corrections_.fill({});
  corrections_[kGraphs] = graphs;
  saved_ = std::move(functions);
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
