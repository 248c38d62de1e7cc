// Between a launch and the collector: hands the engine's knowledge of the launch over. The hook calls both functions
// around the driver's call, and only while launches are collected.
#pragma once

#include <cuda.h>

#include "queue/call.hpp"
#include "telemetry/collector.hpp"

namespace cudasched::runtime {

// Closed (Record::open is false) if the launch is captured: the device does not run it.
telemetry::Record begin_collected(const queue::Call& call) noexcept;
void end_collected(const telemetry::Record& record, const queue::Call& call, CUresult status) noexcept;

// CUDASCHED_COLLECT_DIR starts a collection with the process's first cuInit; an error is logged as a warning.
void collect_if_asked(const std::string& cupti_path) noexcept;

// At exit, or a call.
telemetry::Collected finish_collecting() noexcept;

}  // namespace cudasched::runtime
