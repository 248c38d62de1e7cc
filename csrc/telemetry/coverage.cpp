#include "telemetry/coverage.hpp"

#include "telemetry/cupti.hpp"

namespace cudasched::telemetry {

void start_coverage(const std::string& cupti_path) { cupti::start(cupti::Use::kCount, cupti_path); }

void flush_coverage() {
  if (coverage_started()) cupti::flush(/*all=*/true);
}

bool coverage_started() noexcept { return cupti::started(cupti::Use::kCount); }
std::uint64_t device_launches() noexcept { return cupti::device_launches(); }

}  // namespace cudasched::telemetry
