// All that this process counts, as one record: what telemetry counts, the launcher threads' times, what the predictors
// have no room for. The ticker publishes it in the tables of the process's GPUs (arbiter/counters.hpp), and C and
// Python read it (cudasched_get_counts). Off the launch path; takes the gates' locks for a moment.
#pragma once

#include "arbiter/counters.hpp"

namespace cudasched::runtime {

void gather_counts(arbiter::Counts& counts) noexcept;

// In a forked child, which is another process.
void reset_counts_in_child() noexcept;

}  // namespace cudasched::runtime
