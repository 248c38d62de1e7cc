// The operations behind a graph launch or a copy that may be made between two of its parts: those that no earlier
// queued operation orders behind it (docs/order.md). Knows no driver, no clock and no thread.
//
// Each operation behind the first is looked at once, in order. One that stays blocks its stream and its event for the
// operations behind it. Kernels overtake copies alone: behind a graph they wait at the gate.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "queue/operation.hpp"
#include "queue/order.hpp"

namespace cudasched::queue {

class Overtaking {
 public:
  // `first` is at `position`.
  Overtaking(const Operation& first, Position position) noexcept
      : next_(position + 1), kernels_pass_(first.kind == Operation::Kind::kCopy) {
    if (first.stream == CU_STREAM_LEGACY) ended_ = true;
    stays(first);
  }

  // The next operation to look at; nothing beyond it may overtake once it has ended.
  Position next() const noexcept { return next_; }
  bool ended() const noexcept { return ended_; }

  // May the next operation be made now?
  bool may_pass(const Operation& operation) noexcept {
    ++next_;
    if (operation.made) return false;  // between the parts of an earlier one
    bool passes = false;
    switch (operation.kind) {
      case Operation::Kind::kFill:
      case Operation::Kind::kFillRows:
      case Operation::Kind::kCopy:
        passes = !streams_.has(operation.stream);
        break;
      case Operation::Kind::kRecord:
      case Operation::Kind::kWait:
        passes = !streams_.has(operation.stream) && !events_.has(operation.event.event);
        break;
      case Operation::Kind::kKernel:
        passes = kernels_pass_ && !streams_.has(operation.stream);
        break;
      case Operation::Kind::kGraph:
      case Operation::Kind::kHostFunction:
      case Operation::Kind::kDestroyEvent:
      case Operation::Kind::kFreeMemory:  // after all uses, on whichever stream
      case Operation::Kind::kChange:      // of a graph that is launched before it
        break;
    }
    // A launch may record events; the legacy stream and all others wait for each other.
    const bool records = operation.kind == Operation::Kind::kKernel && operation.launch.attribute_count != 0;
    if (records || operation.stream == CU_STREAM_LEGACY) passes = !(ended_ = true);
    if (!passes) stays(operation);
    return passes;
  }

  // The operation was not made, or not all of it.
  void stays(const Operation& operation) noexcept {
    const bool is_event = operation.kind == Operation::Kind::kRecord || operation.kind == Operation::Kind::kWait ||
                          operation.kind == Operation::Kind::kDestroyEvent;
    if (operation.stream != nullptr && !streams_.add(operation.stream)) ended_ = true;
    if (is_event && !events_.add(operation.event.event)) ended_ = true;
  }

 private:
  template <typename Handle>
  class Set {
   public:
    bool has(Handle handle) const noexcept { return std::find(all_.begin(), end(), handle) != end(); }
    // False where there is no room.
    bool add(Handle handle) noexcept {
      if (has(handle)) return true;
      if (size_ == all_.size()) return false;
      all_[size_++] = handle;
      return true;
    }

   private:
    auto end() const noexcept { return all_.begin() + static_cast<std::ptrdiff_t>(size_); }

    std::array<Handle, 32> all_{};
    std::size_t size_ = 0;
  };

  Position next_;
  bool kernels_pass_;
  bool ended_ = false;
  Set<CUstream> streams_;
  Set<CUevent> events_;
};

}  // namespace cudasched::queue
