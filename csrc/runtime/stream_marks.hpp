// Which streams best-effort regions use, so that the threads that work for a region have the region's class too.
// Autograd's threads launch the backward pass on the streams of the forward pass, and are in no region.
//
// A best-effort region marks each stream that it launches on. The mark lasts until the region is left and its work on
// the stream is complete. A thread in no region that launches on a marked stream is best effort. A stream that waits
// for an event of a best-effort stream inherits the mark, until the first stream waits for an event of another. So do
// NCCL's streams in data-parallel training. Nothing else is ever carried: a mark of class latency would close gates for
// good on the pooled streams of a framework.
//
// Latency work on a marked stream contests the mark: it has no effect until a later region marks the stream anew.
//
// A stream's key is its handle, or for the legacy default stream its context. A per-thread default stream has none:
// no other thread launches there.
//
// find(), mark(), contest(), inherit() and EventOrigins are on the launch path: a few loads and stores in fixed tables.
// sweep() and the forgetting calls come from the ticker and from calls that destroy; the caller of sweep() keeps
// streams from being destroyed meanwhile.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/spin_lock.hpp"

namespace cudasched::runtime {

// The origin of a mark: the token of a region. kNoOrigin: none.
using Origin = std::uint64_t;
inline constexpr Origin kNoOrigin = 0;
// A stream that is bound to best effort: a stream that inherits from it keeps the mark until it waits for another.
inline constexpr Origin kBoundOrigin = ~Origin{0};

class StreamMarks {
 public:
  static constexpr std::size_t kSlots = 1024;
  static constexpr std::size_t kOpenRegions = 256;

  // 0: the stream has no key.
  static std::uint64_t key(CUstream stream, CUcontext context) noexcept {
    if (stream == nullptr || stream == CU_STREAM_PER_THREAD) return 0;
    if (stream != CU_STREAM_LEGACY) return reinterpret_cast<std::uint64_t>(stream);
    return context == nullptr ? 0 : reinterpret_cast<std::uint64_t>(context) | 1;
  }

  // Is any stream marked?
  bool in_use() const noexcept { return live_.load(std::memory_order_relaxed) > 0; }

  // The origin of the stream's mark; kNoOrigin without a mark, or with a contested one.
  Origin find(std::uint64_t key) const noexcept;
  // Has it a mark, contested or not?
  bool marked(std::uint64_t key) const noexcept;

  // The region `origin` launches on the stream. Does nothing where the table is full: overflows() counts.
  void mark(std::uint64_t key, CUstream stream, CUcontext context, Origin origin) noexcept;

  // Latency work is launched on the stream. True: that contests a mark that was not contested before.
  bool contest(std::uint64_t key) noexcept;

  // The stream waits for an event of this origin, by a thread in no region.
  void inherit(std::uint64_t key, CUstream stream, CUcontext context, Origin origin) noexcept;

  // Changes whenever a mark was taken away other than by sweep(), so that a thread looks its remembered mark up anew.
  std::uint64_t epoch() const noexcept { return epoch_.load(std::memory_order_relaxed); }

  std::uint64_t overflows() const noexcept { return overflows_.load(std::memory_order_relaxed); }

  // ---- regions of class best effort; neither is on the launch path
  void entered(Origin origin) noexcept;
  void left(Origin origin) noexcept;
  // Is a stream bound to best effort?
  void bound(bool any) noexcept { any_bound_.store(any, std::memory_order_relaxed); }

  // ---- not on the launch path
  // Is there a mark whose region has been left?
  bool needs_sweep() noexcept;

  // Takes away the marks whose region has been left and for which is_done(stream, context) says that the stream's work
  // is complete.
  template <typename IsDone>
  void sweep(IsDone&& is_done) noexcept {
    if (!in_use()) return;
    for (Slot& slot : slots_) {
      Origin origin = slot.origin.load(std::memory_order_acquire);
      if (origin == kNoOrigin || is_open(origin)) continue;
      if (!is_done(slot.stream.load(std::memory_order_relaxed), slot.context.load(std::memory_order_relaxed))) continue;
      // A region that has marked it meanwhile keeps it.
      if (slot.origin.compare_exchange_strong(origin, kNoOrigin, std::memory_order_acq_rel)) live_.fetch_sub(1);
    }
  }

  // The stream, or everything of the context, goes.
  void forget(std::uint64_t key) noexcept;
  void forget_context(CUcontext context) noexcept;
  // In a forked child, where no region of another thread is open.
  void reset() noexcept;

 private:
  static constexpr std::size_t kProbes = 32;  // bounds a lookup, however many streams have come and gone
  static constexpr std::uint64_t kRemoved = ~std::uint64_t{0};

  // A slot keeps its key when its mark is taken away, until the stream is destroyed.
  struct Slot {
    std::atomic<std::uint64_t> key{0};
    std::atomic<Origin> origin{kNoOrigin};     // kNoOrigin: not marked
    std::atomic<Origin> contested{kNoOrigin};  // the origin of the mark that latency work contested
    std::atomic<CUstream> stream{nullptr};
    std::atomic<CUcontext> context{nullptr};
    std::atomic<bool> inherited{false};
  };

  const Slot* find_slot(std::uint64_t key) const noexcept;
  Slot* claim_slot(std::uint64_t key) noexcept;
  void set(Slot& slot, CUstream stream, CUcontext context, Origin origin, bool inherited) noexcept;
  void release(Slot& slot) noexcept;
  bool is_open(Origin origin) noexcept;

  std::array<Slot, kSlots> slots_;
  std::atomic<int> live_{0};
  std::atomic<std::uint64_t> epoch_{1};
  std::atomic<std::uint64_t> overflows_{0};
  std::atomic<bool> any_bound_{false};
  SpinLock lock_;                            // guards the two below
  std::array<Origin, kOpenRegions> open_{};  // kNoOrigin: free
  int unlisted_ = 0;                         // regions that are open and found no place: no mark is swept meanwhile
};

// Of which origin an event's last record was. A table of fixed size that forgets the oldest of a place: a forgotten
// event carries nothing.
class EventOrigins {
 public:
  void set(CUevent event, Origin origin) noexcept;
  Origin find(CUevent event) const noexcept;
  void clear() noexcept;

 private:
  static constexpr std::size_t kSlots = 4096;
  static constexpr std::size_t kProbes = 4;

  struct Slot {
    std::atomic<CUevent> event{nullptr};
    std::atomic<Origin> origin{kNoOrigin};
  };

  std::array<Slot, kSlots> slots_;
};

}  // namespace cudasched::runtime
