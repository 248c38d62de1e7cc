#include "predict/corrections.hpp"

#include <algorithm>

namespace cudasched::predict {
namespace {

constexpr float kLeastStep = 0.05F;                // of a mean
constexpr std::uint32_t kMostSamples = 1'000'000;  // that are counted

// By the noise over the usual spread of one kernel's first launches of about one length.
float weight_of(float noise) noexcept {
  constexpr float kUsualSpread = 0.15F;
  return kUsualSpread * kUsualSpread / (kUsualSpread * kUsualSpread + noise * noise);
}

constexpr auto by_identity = [](const auto& a, const auto& b) { return a.identity < b.identity; };

}  // namespace

void Corrections::Mean::add(float log) noexcept {
  const float step = std::max(1.0F / static_cast<float>(samples + 1), kLeastStep);
  // One interrupted sample does not carry the mean away.
  const float most = samples < 3 ? kMostRatio : 1.0F;
  log_ratio += step * std::clamp(log - log_ratio, -most, most);
  if (samples < kMostSamples) ++samples;
}

void Corrections::meet(const Function& function) noexcept {
  if (function.index >= kMaxFunctions || means_[function.index].identity != 0) return;
  Mean& mean = means_[function.index];
  mean = Mean{function.identity};
  const auto saved = std::lower_bound(saved_.begin(), saved_.end(), mean, by_identity);
  if (saved != saved_.end() && saved->identity == function.identity) mean = *saved;
  mean.library = libraries_.find(function.traits.library);
}

void Corrections::add(std::uint32_t index, float base_log, float log_ratio, float noise) noexcept {
  if (index == kUncorrected) return;
  const float ratio = std::clamp(log_ratio, -kMostRatio, kMostRatio);
  Mean& mean = means_[index];
  if (mean.samples == 0) {
    if (Library* const library = libraries_.at(mean.library)) library->add(ratio);
  }
  mean.add(ratio);
  if (index < kMaxFunctions) nearby_.add(index, base_log, ratio, weight_of(noise));
}

void Corrections::save(StateWriter& out) const {
  const Mean& graphs = means_[kGraphs];
  out.put(graphs.samples);
  out.put(graphs.log_ratio);

  std::vector<Mean> functions;
  for (std::uint32_t index = 0; index < kMaxFunctions; ++index) {
    if (means_[index].identity != 0 && means_[index].samples != 0) functions.push_back(means_[index]);
  }
  std::sort(functions.begin(), functions.end(), by_identity);
  const std::size_t met = functions.size();
  for (const Mean& earlier : saved_) {
    if (functions.size() == kMaxFunctions) break;
    const auto end = functions.begin() + static_cast<std::ptrdiff_t>(met);
    if (!std::binary_search(functions.begin(), end, earlier, by_identity)) functions.push_back(earlier);
  }
  out.put(static_cast<std::uint32_t>(functions.size()));
  for (const Mean& function : functions) {
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
}

void Corrections::restore(StateReader& in, bool same_base) {
  const auto take = [&](Mean& mean) {
    mean.samples = in.take<std::uint32_t>("number of samples", kMostSamples);
    mean.log_ratio = in.take_real("correction", -kMostRatio, kMostRatio);
  };
  means_.fill({});
  nearby_.clear();
  take(means_[kGraphs]);

  saved_.assign(in.take<std::uint32_t>("number of functions", kMaxFunctions), Mean{});
  for (Mean& function : saved_) {
    function.identity = in.take<std::uint64_t>("identity");
    take(function);
    if (!same_base) function = Mean{function.identity};
  }
  std::sort(saved_.begin(), saved_.end(), by_identity);

  libraries_ = Libraries();
  for (std::size_t left = Libraries::kMost; left > 0; --left) {
    const auto name = in.take<std::uint32_t>("library");
    const auto count = in.take<std::uint32_t>("number of kernels", Library::kMostCount);
    const float mean = in.take_real("correction", -kMostRatio, kMostRatio);
    const float variance = in.take_real("variance", 0, 4 * kMostRatio * kMostRatio);
    Library* const library = name != 0 && same_base ? libraries_.at(libraries_.find(name)) : nullptr;
    if (library != nullptr) *library = {name, count, mean, variance};
  }
}

}  // namespace cudasched::predict
