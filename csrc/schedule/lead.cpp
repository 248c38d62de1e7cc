#include "schedule/lead.hpp"

#include <algorithm>

namespace cudasched::schedule {
namespace {

constexpr std::int64_t kLongestNs = 1'000'000;  // a longer gap or kernel counts as this

}  // namespace

Lead::Lead(const Bounds& bounds) noexcept : bounds_(bounds) {
  bounds_.least_ns = std::max<std::int64_t>(bounds_.least_ns, 0);
  bounds_.most_ns = std::max(bounds_.most_ns, bounds_.least_ns);
  lead_ns_ = static_cast<double>(std::clamp(bounds_.first_ns, bounds_.least_ns, bounds_.most_ns));
  ceiling_ns_ = static_cast<double>(bounds_.most_ns);
}

std::int64_t Lead::ns() const noexcept { return static_cast<std::int64_t>(std::min(lead_ns_, ceiling_ns_)); }

void Lead::submitted(std::int64_t held_ns, std::int64_t dry_ns, std::int64_t gpu_ns) noexcept {
  const auto bounded = [&](std::int64_t time_ns) {
    return static_cast<double>(std::clamp<std::int64_t>(time_ns, 0, kLongestNs));
  };
  held_ = held_ || held_ns > 0;
  const bool too_small = dry_ns > 0 && held_;
  if (dry_ns > 0) held_ = false;
  // A gap that the program made says nothing, neither up nor down.
  if (dry_ns <= 0 || too_small) lead_ns_ += kGain * (bounded(dry_ns) - kDryShare * bounded(gpu_ns));
  // Above the ceiling it would only wind itself up.
  lead_ns_ = std::clamp(lead_ns_, static_cast<double>(bounds_.least_ns), ceiling_ns_);
}

void Lead::completed(std::int64_t time_ns, std::int64_t waited_ns) noexcept {
  if (bounds_.max_inflation <= 0 || time_ns <= waited_ns || waited_ns < 0) return;
  const double inflation = static_cast<double>(time_ns) / static_cast<double>(time_ns - waited_ns);
  ceiling_ns_ += inflation > bounds_.max_inflation ? -(1 - kExceedShare) * kStepNs : kExceedShare * kStepNs;
  ceiling_ns_ = std::clamp(ceiling_ns_, static_cast<double>(bounds_.least_ns), static_cast<double>(bounds_.most_ns));
}

}  // namespace cudasched::schedule
