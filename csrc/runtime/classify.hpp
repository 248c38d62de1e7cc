// Which class a call has: the class bound to its stream, else the class of the calling thread's region. Else best
// effort where a best-effort region has marked the stream (runtime/stream_marks.hpp), else the class of the stream's
// priority where priorities say classes. Else the process's own. The class belongs to the call; a thread's earlier
// calls never decide it.
//
// classify() runs on the launch path: a few loads. Binding streams and opening regions do not.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/class.hpp"
#include "base/handle_table.hpp"

namespace cudasched::queue {
class Queue;
}

namespace cudasched::runtime {

class Device;

struct Region {
  Class region_class = Class::kNormal;
  std::int32_t priority = 0;
  std::int64_t slo_ns = 0;
  std::int64_t deadline_ns = 0;  // 0: none
  std::int64_t entered_ns = 0;
  static constexpr int kUncounted = -1;
  int counted = kUncounted;  // its place in telemetry::RegionCounts, by its name
  std::uint16_t traced = 0;  // the number of its name in traces; 0: nothing was traced when it was entered
  std::uint64_t token = 0;
  std::uint32_t devices = 0;  // bitmap of the device ordinals that count this region as open
  // Set by another thread that ends the region (Regions::may_move); null: no other thread can.
  std::shared_ptr<const std::atomic<bool>> ended_elsewhere;

  bool ended() const noexcept { return ended_elsewhere && ended_elsewhere->load(std::memory_order_relaxed); }
};

// The regions that a thread has open, the innermost last.
struct RegionStack {
  static constexpr int kCapacity = 32;
  std::array<Region, kCapacity> regions{};
};

// The engine's memory of a thread. Lives in initial-exec thread-local storage: no allocation, no lookup. All libraries
// that are loaded late share the loader's reserve of such storage, so this type stays small. The first region entry of
// a thread allocates the regions themselves.
struct ThreadState {
  unsigned index = 0;             // for counter shards; 0: not yet given
  int depth = 0;                  // open regions
  RegionStack* stack = nullptr;   // not null where depth > 0
  const void* context = nullptr;  // the context that `device` was found for
  std::uint64_t context_epoch = 0;
  Device* device = nullptr;
  const void* noted_stream = nullptr;   // the last stream that a latency launch was noted on,
  std::uint64_t noted_epoch = 0;        // and in which activity
  const void* marked_stream = nullptr;  // the last stream that a best-effort region was seen to launch on,
  std::uint64_t marked_stamp = 0;       // the region, and the epoch of the marks
  const queue::Queue* feeds = nullptr;  // queue of the last launch; null: none, or backed off after a wait
  bool empties_cache = false;           // for a latency client that waits for memory: drained launches pass the gate

  // The innermost region that has not ended; null: there is none.
  Region* innermost() const noexcept {
    for (int i = depth; i > 0; --i) {
      Region& region = stack->regions[static_cast<std::size_t>(i - 1)];
      if (!region.ended()) [[likely]]
        return &region;
    }
    return nullptr;
  }
};
static_assert(sizeof(ThreadState) <= 128);

extern constinit thread_local ThreadState thread_state __attribute__((tls_model("initial-exec")));

inline ThreadState& this_thread() noexcept { return thread_state; }

// How many latency regions are open on the thread, whatever region is the innermost?
inline int latency_regions(const ThreadState& thread) noexcept {
  int count = 0;
  for (int i = 0; i < thread.depth; ++i) {
    const Region& region = thread.stack->regions[static_cast<std::size_t>(i)];
    if (region.region_class == Class::kLatency && !region.ended()) ++count;
  }
  return count;
}

inline bool in_latency_region(const ThreadState& thread) noexcept { return latency_regions(thread) > 0; }

// Streams with a class of their own. Lookups take no lock, writers hold one of the caller's.
class StreamClasses {
 public:
  static constexpr std::size_t kCapacity = 256;

  constexpr StreamClasses() noexcept : table_(kCapacity) {}
  ~StreamClasses() {}  // the table stays: other threads may still launch while the process exits
  StreamClasses(const StreamClasses&) = delete;
  StreamClasses& operator=(const StreamClasses&) = delete;

  // False when the table is full. Not on the launch path.
  bool bind(std::uint64_t stream, Class value) noexcept {
    return table_.set(stream, {static_cast<std::uint64_t>(value)});
  }
  void unbind(std::uint64_t stream) noexcept { table_.erase(stream); }

  bool empty() const noexcept { return table_.size() == 0; }
  // Returns false where the stream has no class.
  bool find(std::uint64_t stream, Class& value) const noexcept;

 private:
  union {
    HandleTable<1> table_;
  };
};

}  // namespace cudasched::runtime
