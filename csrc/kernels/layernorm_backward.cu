// The gradients of layer normalisation: of x, and of weight and bias, which are sums over the rows. With RMS=1 those of
// its relative without mean and bias. Mean and variance are computed anew from x, and so take no memory; a row that is
// kept is read once. Sums are float for all types of elements.
//
// With g = dy * weight and n = (x - mean) * scale, where scale = 1 / sqrt(variance + epsilon):
//   dx = scale * (g - mean of g - n * mean of g * n),   dweight = sum of dy * n,   dbias = sum of dy.
//
// Blocks walk over the rows, each with sums of its own for the columns. The sums meet in two stages, always in the
// order of the blocks, so that the result does not depend on which was last. The last block of GROUP adds the sums of
// its group, the last group those of all groups.
//
// Parameters beside those of row.cuh: RMS; STATISTICS: 0 mean, variance and the sums of the gradient one after another,
// 1 all in one pass, shifted by the row's first value; ACCUMULATE: where a thread's sums over the rows are, 0 in
// registers, 1 in shared memory; GROUP; MIN_BLOCKS, the blocks that the compiler leaves registers for.
#include "last_block.cuh"
#include "row.cuh"

#ifndef RMS
#define RMS 0
#endif

namespace {

using namespace cudasched::kernels;

constexpr int kSums = RMS ? 1 : 2;  // of a column: for the weight, and for the bias
// Floats of the sums over the rows; each such row begins at a multiple of 16 bytes.
constexpr int kRowSums = (kSums * COLS + 3) / 4 * 4;
constexpr int kWide = COLS % 4 == 0 ? 4 : 1;

struct Pair {
  float a;
  float b;
};

// Two sums over a row at the price of the barriers of one. `scratch` holds 2 * WARPS_PER_ROW floats of this row.
__device__ __forceinline__ Pair row_sums(Pair pair, float* scratch, int warp, int lane) {
  pair.a = reduce_warp<Sum>(pair.a);
  pair.b = reduce_warp<Sum>(pair.b);
  if constexpr (WARPS_PER_ROW > 1) {
    if (lane == 0) {
      scratch[warp] = pair.a;
      scratch[WARPS_PER_ROW + warp] = pair.b;
    }
    __syncthreads();
    pair.a = reduce_warp<Sum>(lane < WARPS_PER_ROW ? scratch[lane] : 0.0f);
    pair.b = reduce_warp<Sum>(lane < WARPS_PER_ROW ? scratch[WARPS_PER_ROW + lane] : 0.0f);
    __syncthreads();
  }
  return pair;
}

// The rows of x and dy at one place, read from global memory each time or kept after the first time, as in row.cuh.
class Rows {
 public:
  __device__ __forceinline__ Rows(const Element* x, const Element* dy, const Element* weight, bool exists, int thread,
                                  Vector<VECTOR>* shared)
      : x_(reinterpret_cast<const Vector<VECTOR>*>(x)),
        dy_(reinterpret_cast<const Vector<VECTOR>*>(dy)),
        weight_(reinterpret_cast<const Vector<VECTOR>*>(weight)),
        shared_(shared),
        thread_(thread),
        exists_(exists) {}

  // Calls visit(place, item, x, dy, weight) with vectors, for those of this thread.
  template <bool First, typename Visit>
  __device__ __forceinline__ void walk(Visit&& visit) {
    if (!exists_) return;
#if KEEP == KEEP_REGISTERS
    if constexpr (First) {  // all loads are under way before the first value is needed
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const int place = thread_ + item * kThreadsPerRow;
        if (!has(place)) continue;
        kept_x_[item] = load<STREAM_LOADS != 0>(x_ + place);
        kept_dy_[item] = load<STREAM_LOADS != 0>(dy_ + place);
      }
    }
#endif
    // A thread's sums or kept values are in registers: then `item` has to be a constant.
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int place = thread_ + item * kThreadsPerRow;
      if (!has(place)) continue;
#if KEEP == KEEP_REGISTERS
      visit(place, item, kept_x_[item], kept_dy_[item], load<false>(weight_ + place));
#elif KEEP == KEEP_SHARED
      if constexpr (First) {  // each thread reads only its own writes: no barrier
        shared_[place] = load<STREAM_LOADS != 0>(x_ + place);
        shared_[kVectors + place] = load<STREAM_LOADS != 0>(dy_ + place);
      }
      visit(place, item, shared_[place], shared_[kVectors + place], load<false>(weight_ + place));
#else
      visit(place, item, load<STREAM_LOADS != 0>(x_ + place), load<STREAM_LOADS != 0>(dy_ + place),
            load<false>(weight_ + place));
#endif
    }
  }

  // Calls visit(x, dy * weight) for each of this thread's elements.
  template <bool First, typename Visit>
  __device__ __forceinline__ void each(Visit&& visit) {
    walk<First>([&](int, int, const Vector<VECTOR>& x, const Vector<VECTOR>& dy, const Vector<VECTOR>& weight) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) visit(to_float(x.at[i]), to_float(dy.at[i]) * to_float(weight.at[i]));
    });
  }

 private:
  static __device__ __forceinline__ bool has(int place) { return kVectors % kThreadsPerRow == 0 || place < kVectors; }

  const Vector<VECTOR>* x_;
  const Vector<VECTOR>* dy_;
  const Vector<VECTOR>* weight_;
  Vector<VECTOR>* shared_;
  int thread_;
  bool exists_;
#if KEEP == KEEP_REGISTERS
  Vector<VECTOR> kept_x_[kItems];
  Vector<VECTOR> kept_dy_[kItems];
#endif
};

struct Statistics {
  float mean;
  float scale;
  float mean_g;   // of g
  float mean_gn;  // of g * n
};

__device__ __forceinline__ Statistics statistics(Rows& rows, float shift, float epsilon, float* scratch, int warp,
                                                 int lane) {
  Statistics made{};
  Pair sums{0.0f, 0.0f};
#if RMS
  rows.each<true>([&](float x, float g) {
    sums.a += x * x;
    sums.b += g * x;
  });
  sums = row_sums(sums, scratch, warp, lane);
  made.scale = rsqrtf(sums.a / COLS + epsilon);
  made.mean_gn = sums.b / COLS * made.scale;
#elif STATISTICS == 0
  rows.each<true>([&](float x, float g) {
    sums.a += x;
    sums.b += g;
  });
  sums = row_sums(sums, scratch, warp, lane);
  made.mean = sums.a / COLS;
  made.mean_g = sums.b / COLS;
  sums = {0.0f, 0.0f};
  rows.each<false>([&](float x, float g) {
    sums.a += (x - made.mean) * (x - made.mean);
    sums.b += (x - made.mean) * g;
  });
  sums = row_sums(sums, scratch, warp, lane);
  made.scale = rsqrtf(sums.a / COLS + epsilon);
  made.mean_gn = sums.b / COLS * made.scale;
#else
  Pair products{0.0f, 0.0f};
  rows.each<true>([&](float x, float g) {
    sums.a += x - shift;
    sums.b += g;
    products.a += (x - shift) * (x - shift);
    products.b += (x - shift) * g;
  });
  sums = row_sums(sums, scratch, warp, lane);
  products = row_sums(products, scratch, warp, lane);
  const float shifted = sums.a / COLS;
  made.mean = shifted + shift;
  made.mean_g = sums.b / COLS;
  made.scale = rsqrtf(fmaxf(products.a / COLS - shifted * shifted, 0.0f) + epsilon);
  made.mean_gn = (products.b / COLS - shifted * made.mean_g) * made.scale;
#endif
  return made;
}

// Adds `count` rows of sums that are `stride` rows apart, in order, and gives emit(column, sums) each kWide columns.
template <typename Emit>
__device__ __forceinline__ void add_rows(const float* first, int count, int stride, Emit&& emit) {
  union Wide {
    Word<kWide * 4>::Type word;
    float at[kWide];
  };
  for (int column = static_cast<int>(threadIdx.x) * kWide; column < kSums * COLS; column += kThreads * kWide) {
    float sum[kWide] = {};
#pragma unroll 4
    for (int row = 0; row < count; ++row) {
      const float* from = first + static_cast<long long>(row) * stride * kRowSums + column;
      Wide read;
      read.word = __ldcg(reinterpret_cast<const decltype(read.word)*>(from));
#pragma unroll
      for (int i = 0; i < kWide; ++i) sum[i] += read.at[i];
    }
    emit(column, sum);
  }
}

}  // namespace

// x, dy, dx: rows x COLS; weight, dweight, dbias (not with RMS): COLS. The grid has no more blocks than rows need.
// workspace: kRowSums floats a block, and then an unsigned for each group and one more, zero before the first launch
// and after each. Dynamic shared memory: 2 * ROWS_PER_BLOCK rows where KEEP is KEEP_SHARED, then kRowSums floats: for
// each row of the block where ACCUMULATE is 1, none with one row and ACCUMULATE 0.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    layernorm_backward(Element* __restrict__ dx, Element* __restrict__ dweight,
#if !RMS
                       Element* __restrict__ dbias,
#endif
                       const Element* __restrict__ dy, const Element* __restrict__ x,
                       const Element* __restrict__ weight, float* workspace, int rows, float epsilon) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ float scratch_all[2 * ROWS_PER_BLOCK * WARPS_PER_ROW];

  const int thread = static_cast<int>(threadIdx.x) % kThreadsPerRow;
  const int local = static_cast<int>(threadIdx.x) / kThreadsPerRow;
  const int warp = thread / kWarpThreads;
  const int lane = thread % kWarpThreads;
  float* scratch = scratch_all + local * 2 * WARPS_PER_ROW;
  auto* kept = reinterpret_cast<Vector<VECTOR>*>(shared) + local * 2 * kVectors;
  constexpr int kKeptBytes = KEEP == KEEP_SHARED ? 2 * ROWS_PER_BLOCK * COLS * static_cast<int>(sizeof(Element)) : 0;
  auto* sums = reinterpret_cast<float*>(shared + (kKeptBytes + 15) / 16 * 16);

#if ACCUMULATE == 1
  // Each thread touches the sums of its own columns alone until the rows are done.
  float* mine = sums + local * kRowSums;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int place = thread + item * kThreadsPerRow;
    if (place >= kVectors) break;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
#pragma unroll
      for (int sum = 0; sum < kSums; ++sum) mine[sum * COLS + place * VECTOR + i] = 0.0f;
    }
  }
#else
  float mine[kSums][kItems * VECTOR] = {};
#endif

  for (long long first = static_cast<long long>(blockIdx.x) * ROWS_PER_BLOCK; first < rows;
       first += static_cast<long long>(gridDim.x) * ROWS_PER_BLOCK) {
    const long long index = first + local;
    const bool exists = index < rows;
    const long long offset = (exists ? index : 0) * COLS;
    Rows row(x + offset, dy + offset, weight, exists, thread, kept);
    const float shift = STATISTICS == 1 && !RMS ? to_float(x[offset]) : 0.0f;
    const Statistics found = statistics(row, shift, epsilon, scratch, warp, lane);
    auto* out = reinterpret_cast<Vector<VECTOR>*>(dx + offset);
    row.walk<false>(
        [&](int place, int item, const Vector<VECTOR>& xs, const Vector<VECTOR>& dys, const Vector<VECTOR>& weights) {
          Vector<VECTOR> made;
#pragma unroll
          for (int i = 0; i < VECTOR; ++i) {
            const float gradient = to_float(dys.at[i]);
            const float normal = (to_float(xs.at[i]) - found.mean) * found.scale;
            const float g = gradient * to_float(weights.at[i]);
            from_float((g - found.mean_g - normal * found.mean_gn) * found.scale, made.at[i]);
#if ACCUMULATE == 1
            mine[place * VECTOR + i] += gradient * normal;
            if constexpr (!RMS) mine[(kSums - 1) * COLS + place * VECTOR + i] += gradient;
#else
            mine[0][item * VECTOR + i] += gradient * normal;
            if constexpr (!RMS) mine[kSums - 1][item * VECTOR + i] += gradient;
#endif
          }
          store<STREAM_STORES != 0>(out + place, made);
        });
  }

  // The block's sums, into its row of the workspace.
  float* block_sums = workspace + static_cast<long long>(blockIdx.x) * kRowSums;
#if ACCUMULATE == 1
  __syncthreads();
  for (int column = static_cast<int>(threadIdx.x); column < kSums * COLS; column += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int row = 0; row < ROWS_PER_BLOCK; ++row) sum += sums[row * kRowSums + column];
    block_sums[column] = sum;
  }
#else
#pragma unroll
  for (int turn = 0; turn < ROWS_PER_BLOCK; ++turn) {  // one row of threads after another
    float* to = turn == ROWS_PER_BLOCK - 1 ? block_sums : sums;
    if (turn > 0) __syncthreads();
    if (local != turn) continue;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int place = thread + item * kThreadsPerRow;
      if (place >= kVectors) break;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
#pragma unroll
        for (int sum = 0; sum < kSums; ++sum) {
          const int column = sum * COLS + place * VECTOR + i;
          to[column] = mine[sum][item * VECTOR + i] + (turn > 0 ? sums[column] : 0.0f);
        }
      }
    }
  }
#endif

  const int blocks = static_cast<int>(gridDim.x);
  const int groups = (blocks + GROUP - 1) / GROUP;
  const int group = static_cast<int>(blockIdx.x) / GROUP;
  const int members = min(GROUP, blocks - group * GROUP);
  auto* arrived = reinterpret_cast<unsigned*>(workspace + static_cast<long long>(blocks) * kRowSums);
  if (!is_last_block(arrived + group, static_cast<unsigned>(members))) return;
  if (groups > 1) {
    float* group_sums = workspace + static_cast<long long>(group) * GROUP * kRowSums;
    add_rows(group_sums, members, 1, [&](int column, const float* found) {
#pragma unroll
      for (int i = 0; i < kWide; ++i) group_sums[column + i] = found[i];
    });
    if (!is_last_block(arrived + groups, static_cast<unsigned>(groups))) return;
  }
  add_rows(workspace, groups > 1 ? groups : members, groups > 1 ? GROUP : 1, [&](int column, const float* found) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
#if RMS
      from_float(found[i], dweight[column + i]);
#else
      from_float(found[i], column < COLS ? dweight[column + i] : dbias[column - COLS + i]);
#endif
    }
  });
}
