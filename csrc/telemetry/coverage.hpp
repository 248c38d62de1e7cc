// Counts the launches that the device really ran, with CUPTI activity records: kernels launched one by one, and graph
// launches. Opt-in, because CUPTI costs time and admits one profiler (telemetry/cupti.hpp).
#pragma once

#include <cstdint>
#include <string>

namespace cudasched::telemetry {

// Starts counting. `cupti_path` may be empty: the loader's own search. Throws Error: no CUPTI, another profiler holds
// it, or the driver refuses. Call it after cuInit has succeeded. A second call does nothing.
void start_coverage(const std::string& cupti_path);

// Waits until the device's finished work is counted. Synchronise with the device first. Throws Error.
void flush_coverage();

bool coverage_started() noexcept;
std::uint64_t device_launches() noexcept;

}  // namespace cudasched::telemetry
