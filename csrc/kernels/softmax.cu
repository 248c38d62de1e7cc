// Softmax of each row, y = exp(x - max) / sum(exp(x - max)), in float for all types of elements.
//
// Parameters beside those of row.cuh: ONLINE: 0 the maximum first, then the sum, 1 both in one pass, where a thread
// rescales its sum when its maximum grows (Milakov and Gimelshein, 2018); MIN_BLOCKS, the blocks that the compiler
// leaves registers for. A grid smaller than the rows need walks over the rows.
#include "row.cuh"

namespace {

using namespace cudasched::kernels;

constexpr float kLog2E = 1.4426950408889634f;

}  // namespace

// x, y: rows x COLS. Dynamic shared memory: ROWS_PER_BLOCK rows where KEEP is KEEP_SHARED.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    softmax(Element* __restrict__ y, const Element* __restrict__ x, int rows) {
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
    float maximum = Maximum::neutral();
    float sum = 0.0f;
#if ONLINE == 0
    row.each<true>([&](float value) { maximum = fmaxf(maximum, value); });
    maximum = reduce_row<Maximum, WARPS_PER_ROW>(maximum, scratch, warp, lane);
    row.each<false>([&](float value) { sum += exp2f((value - maximum) * kLog2E); });
    sum = reduce_row<Sum, WARPS_PER_ROW>(sum, scratch, warp, lane);
#else
    row.each<true>([&](float value) {
      const float larger = fmaxf(maximum, value);
      // Equal also where both are minus infinity, whose difference would be NaN.
      if (larger != maximum) sum *= exp2f((maximum - larger) * kLog2E);
      sum += value == Maximum::neutral() ? 0.0f : exp2f((value - larger) * kLog2E);
      maximum = larger;
    });
    const float own = maximum;
    maximum = reduce_row<Maximum, WARPS_PER_ROW>(maximum, scratch, warp, lane);
    if (own != maximum) sum *= exp2f((own - maximum) * kLog2E);
    sum = reduce_row<Sum, WARPS_PER_ROW>(sum, scratch, warp, lane);
#endif
    const float scale = 1.0f / sum;
    row.write(y + offset, [&](const Vector<VECTOR>& vector, int) {
      Vector<VECTOR> made;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        from_float(exp2f((to_float(vector.at[i]) - maximum) * kLog2E) * scale, made.at[i]);
      }
      return made;
    });
  }
}
