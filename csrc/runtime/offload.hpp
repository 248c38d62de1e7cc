// A device's launch queue behind its gate: the launcher thread asks the gate for each launch it takes from the ring.
#pragma once

#include <cuda.h>

#include "queue/queue.hpp"
#include "runtime/gate.hpp"

namespace cudasched::runtime {

// The gate as the launcher sees it. One launcher uses it, so one launch at a time is between admit() and submitted().
class GateAdmission final : public queue::Admission {
 public:
  explicit GateAdmission(Gate& gate) noexcept : gate_(gate) {}

  void admit(const queue::Operation& launch, queue::Position position, const queue::Opening& opening) noexcept override;
  void submitted(const queue::Operation& launch, CUresult status, bool overlap_follows) noexcept override;
  void wake() noexcept override;

 private:
  Gate& gate_;
  Gate::Pass pass_;
};

}  // namespace cudasched::runtime
