// Layer normalisation of each row, y = (x - mean) / sqrt(variance + epsilon) * weight + bias; with RMS=1 its relative
// without mean and bias. Sums are float for all types of elements.
//
// Parameters beside those of row.cuh: RMS; STATISTICS: 0 the mean first, then the variance around it, 1 both in one
// pass over values shifted by the row's first one, so that a large mean does not cancel the variance; MIN_BLOCKS, the
// blocks that the compiler leaves registers for. A grid smaller than the rows need walks over the rows.
#include "row.cuh"

#ifndef RMS
#define RMS 0
#endif

namespace {

using namespace cudasched::kernels;

__device__ __forceinline__ float row_sum(float value, float* scratch, int warp, int lane) {
  return reduce_row<Sum, WARPS_PER_ROW>(value, scratch, warp, lane);
}

}  // namespace

// x, y: rows x COLS; weight, bias: COLS. Dynamic shared memory: ROWS_PER_BLOCK rows where KEEP is KEEP_SHARED.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    layernorm(Element* __restrict__ y, const Element* __restrict__ x, const Element* __restrict__ weight,
              const Element* __restrict__ bias, int rows, float epsilon) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ float scratch_all[ROWS_PER_BLOCK * WARPS_PER_ROW];

  const int thread = threadIdx.x % kThreadsPerRow;
  const int local = threadIdx.x / kThreadsPerRow;
  const int warp = thread / kWarpThreads;
  const int lane = thread % kWarpThreads;
  float* scratch = scratch_all + local * WARPS_PER_ROW;
  auto* kept = reinterpret_cast<Vector<VECTOR>*>(shared) + local * kVectors;

  for (long long first = static_cast<long long>(blockIdx.x) * ROWS_PER_BLOCK; first < rows;
       first += static_cast<long long>(gridDim.x) * ROWS_PER_BLOCK) {
    const long long index = first + local;
    const bool exists = index < rows;
    const long long offset = (exists ? index : 0) * COLS;
    Row row(x + offset, exists, thread, kept);
    float mean = 0.0f;
    float variance = 0.0f;
#if RMS
    row.each<true>([&](float value) { variance += value * value; });
    variance = row_sum(variance, scratch, warp, lane) / COLS;
#elif STATISTICS == 0
    row.each<true>([&](float value) { mean += value; });
    mean = row_sum(mean, scratch, warp, lane) / COLS;
    row.each<false>([&](float value) { variance += (value - mean) * (value - mean); });
    variance = row_sum(variance, scratch, warp, lane) / COLS;
#else
    const float shift = to_float(x[offset]);
    row.each<true>([&](float value) {
      mean += value - shift;
      variance += (value - shift) * (value - shift);
    });
    mean = row_sum(mean, scratch, warp, lane) / COLS;
    variance = fmaxf(row_sum(variance, scratch, warp, lane) / COLS - mean * mean, 0.0f);
    mean += shift;
#endif
    const float scale = rsqrtf(variance + epsilon);
    row.write(y + offset, [&](const Vector<VECTOR>& vector, int place) {
      const auto weights = load<false>(reinterpret_cast<const Vector<VECTOR>*>(weight) + place);
#if !RMS
      const auto biases = load<false>(reinterpret_cast<const Vector<VECTOR>*>(bias) + place);
#endif
      Vector<VECTOR> made;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float value = (to_float(vector.at[i]) - mean) * scale * to_float(weights.at[i]);
#if RMS
        from_float(value, made.at[i]);
#else
        from_float(value + to_float(biases.at[i]), made.at[i]);
#endif
      }
      return made;
    });
  }
}
