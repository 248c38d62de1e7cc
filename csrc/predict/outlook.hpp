// What a launch will make of the GPU, said before it runs and beside its time: how full it is, and how hard it works.
//
// Arithmetic over what the predictor is asked and what it answers; occupancy is the driver's own. Nothing is learned.
// No allocation, no lock; any thread; some 30 ns.
#pragma once

#include <cstdint>

#include "predict/launch.hpp"

namespace cudasched::predict {

// Shares are 0 to 1.
struct Outlook {
  float occupancy = 0;         // threads resident of those that a full multiprocessor can hold
  float waves = 0;             // blocks over what the device holds at once
  float sm_utilisation = 0;    // up to one wave the multiprocessors that have a block; above, waves over whole waves
  float block_efficiency = 0;  // threads of a block over those of its warps
  float bytes_per_s = 0;       // the least that it must move in the predicted time (work.hpp); 0: not known
  float flops_per_s = 0;       // alike
};

// `duration_ns`: the predicted time, or a measured one. Of a graph all is 0.
Outlook outlook_of(const Query& query, std::int64_t duration_ns) noexcept;

}  // namespace cudasched::predict
