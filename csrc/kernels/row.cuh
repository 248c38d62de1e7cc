// One row of a matrix, held by `Warps` warps: read from global memory each time, or kept in registers or shared memory
// after the first time. Shared by layernorm and softmax.
//
// Parameters (macros): TYPE, COLS, WARPS_PER_ROW, ROWS_PER_BLOCK, VECTOR, KEEP, UNROLL, STREAM_LOADS, STREAM_STORES.
#pragma once

#include "common.cuh"

#define KEEP_NOTHING 0
#define KEEP_REGISTERS 1
#define KEEP_SHARED 2

namespace cudasched::kernels {

constexpr int kThreadsPerRow = kWarpThreads * WARPS_PER_ROW;
constexpr int kThreads = kThreadsPerRow * ROWS_PER_BLOCK;
constexpr int kVectors = COLS / VECTOR;  // of a row
constexpr int kUnroll = UNROLL;          // a pragma takes a constant, no macro
constexpr int kItems = (kVectors + kThreadsPerRow - 1) / kThreadsPerRow;
static_assert(COLS % VECTOR == 0, "a row is whole vectors");
static_assert(WARPS_PER_ROW <= kWarpThreads, "one warp reduces what the warps have found");

class Row {
 public:
  // `thread` is the place among the row's threads; `shared` has room for the row where KEEP is KEEP_SHARED.
  __device__ __forceinline__ Row(const Element* row, bool exists, int thread, Vector<VECTOR>* shared)
      : row_(reinterpret_cast<const Vector<VECTOR>*>(row)), shared_(shared), thread_(thread), exists_(exists) {}

  // Calls visit(value) for each of this thread's elements, first time or again. Elements of rows beyond the end are
  // not visited.
  template <bool First, typename Visit>
  __device__ __forceinline__ void each(Visit&& visit) {
    walk<First>([&](int, const Vector<VECTOR>& vector) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) visit(to_float(vector.at[i]));
    });
  }

  // Writes map(vector, place) of each of this thread's vectors to `out`, a vector of elements at the same place.
  template <typename Map>
  __device__ __forceinline__ void write(Element* out, Map&& map) {
    auto* to = reinterpret_cast<Vector<VECTOR>*>(out);
    walk<false>(
        [&](int place, const Vector<VECTOR>& vector) { store<STREAM_STORES != 0>(to + place, map(vector, place)); });
  }

 private:
  template <bool First, typename Visit>
  __device__ __forceinline__ void walk(Visit&& visit) {
    if (!exists_) return;
#if KEEP == KEEP_REGISTERS
    if constexpr (First) {  // all loads are under way before the first value is needed
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const int place = thread_ + item * kThreadsPerRow;
        if (whole() || place < kVectors) kept_[item] = load<STREAM_LOADS != 0>(row_ + place);
      }
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int place = thread_ + item * kThreadsPerRow;
      if (whole() || place < kVectors) visit(place, kept_[item]);
    }
#else
#pragma unroll kUnroll
    for (int item = 0; item < kItems; ++item) {
      const int place = thread_ + item * kThreadsPerRow;
      if (whole() || place < kVectors) {
#if KEEP == KEEP_SHARED
        Vector<VECTOR> vector;
        if constexpr (First) {  // each thread reads only its own writes: no barrier
          vector = load<STREAM_LOADS != 0>(row_ + place);
          shared_[place] = vector;
        } else {
          vector = shared_[place];
        }
        visit(place, vector);
#else
        visit(place, load<STREAM_LOADS != 0>(row_ + place));
#endif
      }
    }
#endif
  }

  static __device__ __forceinline__ constexpr bool whole() { return kVectors % kThreadsPerRow == 0; }

  const Vector<VECTOR>* row_;
  Vector<VECTOR>* shared_;
  int thread_;
  bool exists_;
#if KEEP == KEEP_REGISTERS
  Vector<VECTOR> kept_[kItems];
#endif
};

}  // namespace cudasched::kernels
