// Stands for PyTorch's allocator: the test says what it does.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>

namespace c10::cuda::CUDACachingAllocator {

struct TraceEntry {
  enum Action {
    ALLOC,
    FREE_REQUESTED,
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    SNAPSHOT,
    OOM
  };
  Action action_;
  signed char device_;
  std::size_t addr_;
  void* stream_;
  std::size_t size_;
};

inline std::function<void(const TraceEntry&)> tracker;
inline void attachAllocatorTraceTracker(std::function<void(const TraceEntry&)> given) { tracker = std::move(given); }

inline int emptied = 0;
inline void emptyCache() { ++emptied; }

}  // namespace c10::cuda::CUDACachingAllocator

extern "C" __attribute__((visibility("default"))) inline int double_emptied() {
  return c10::cuda::CUDACachingAllocator::emptied;
}
__attribute__((used)) inline auto* const keep_double_emptied = &double_emptied;

extern "C" __attribute__((visibility("default"))) inline void double_does(int action, int device, std::size_t address,
                                                                          std::size_t size, std::size_t stream) {
  using namespace c10::cuda::CUDACachingAllocator;
  tracker(TraceEntry{static_cast<TraceEntry::Action>(action), static_cast<signed char>(device), address,
                     reinterpret_cast<void*>(stream), size});
}
__attribute__((used)) inline auto* const keep_double_does = &double_does;
