// The figures that a gate goes by, a program's or a simulation's. The defaults are users' (docs/configuration.md).
#pragma once

#include <cstdint>

#include "schedule/lead.hpp"

namespace cudasched::schedule {

struct GateSettings {
  bool adaptive_lead = false;          // else lead_ns as it is
  std::int64_t lead_ns = 20'000;       // to begin with
  Lead::Bounds lead_bounds;            // of the adaptive lead, which begins with lead_ns
  double host_bound_inflation = 1.03;  // how much longer a segment of a request may take
  std::int64_t linger_ns = 100'000;
  std::int64_t margin_ns = 200'000;
  std::int64_t long_ns = 300'000;
  std::int64_t turn_ns = 3'000'000;
  std::int64_t stale_heartbeat_ns = 100'000'000;

  Lead lead() const noexcept {
    Lead::Bounds bounds = lead_bounds;
    bounds.first_ns = lead_ns;
    if (!adaptive_lead) bounds.least_ns = bounds.most_ns = lead_ns;
    return Lead(bounds);
  }
};

}  // namespace cudasched::schedule
