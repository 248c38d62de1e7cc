// A device's launch queue behind its gate: the launcher thread asks the gate for each launch it takes from the ring.
#pragma once

#include <cuda.h>

#include "queue/queue.hpp"
#include "runtime/gate.hpp"
#include "runtime/slices/slices.hpp"

namespace cudasched::runtime {

// The gate as the launcher sees it. One launcher uses it, so one launch at a time is between admit() and submitted().
class GateAdmission final : public queue::Admission {
 public:
  explicit GateAdmission(Gate& gate) noexcept : gate_(gate) {}

  std::int64_t admit(const queue::Operation& launch, queue::Position position,
                     const queue::Opening& opening) noexcept override;
  void submitted(const queue::Operation& launch, CUresult status, bool overlap_follows) noexcept override;
  std::uint32_t begin_graph(const queue::Operation& launch) noexcept override;
  CUgraphExec part(std::uint32_t index) noexcept override;
  bool may_go_whole() noexcept override;
  void end_graph(const queue::Operation& launch, CUresult status) noexcept override;
  void change_graph(const queue::Operation& change) noexcept override;
  queue::Operation::Direction direction_of_pieces(const queue::Operation& copy) noexcept override {
    return gate_.direction_of_pieces(copy);
  }
  std::size_t next_piece(const queue::Operation& copy, queue::Operation::Direction direction,
                         bool all) noexcept override {
    return all ? copy.copy.bytes : gate_.next_piece(direction, copy.copy.bytes);
  }
  void piece_submitted(const queue::Operation& piece, queue::Operation::Direction direction,
                       CUresult status) noexcept override;
  void wake() noexcept override;

  // Before the first launch.
  void use(Slices* slices) noexcept { slices_ = slices; }

 private:
  void trace(const queue::Operation& operation, CUresult status) const noexcept;

  Gate& gate_;
  Slices* slices_ = nullptr;
  Slices::Launch graph_;  // under way
  bool refused_ = false;  // its first part
  Gate::Pass pass_;
  CUgraphExec whole_ = nullptr;  // the graph under way,
  std::uint32_t part_ = 0;       // and which of its parts
  std::int64_t traced_ns_ = 0;   // since when the launch under way may go; 0: nothing is traced
};

}  // namespace cudasched::runtime
