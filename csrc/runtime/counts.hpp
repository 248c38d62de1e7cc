// All counts of this process, as one record: telemetry's counters, the launcher threads' times, the kernels that the
// predictors have no room for. The ticker publishes the record in the tables of the process's GPUs
// (arbiter/counters.hpp), and C and Python read the record (cudasched_get_counts). Off the launch path; takes the
// gates' locks for a moment.
#pragma once

#include "arbiter/counters.hpp"

namespace cudasched::runtime {

void gather_counts(arbiter::Counts& counts) noexcept;

// In a forked child, which is another process.
void reset_counts_in_child() noexcept;

}  // namespace cudasched::runtime
