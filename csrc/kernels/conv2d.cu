// Convolution of images, y[n, p, q, f] = bias[f] + sum over r, s, c of x[n, p * stride + r * dilation - padding, ...,
// c] * w[f, r, s, c], in fp16 or bf16 with fp32 sums, on the tensor cores of sm_80 and later (mma.sync). Channels are
// last.
//
// It is a matrix product of the pixels of y (m of them, images * out_height * out_width) and the filters, over k = rows
// * columns * channels; the matrix of patches is never made: a thread copies chunks of eight channels of pixels that it
// works out itself. It knows the corners of its pixels' patches from the beginning, and from step to step the place in
// the patch moves on by additions.
//
// Parameters: TYPE (TYPE_FP16, TYPE_BF16); TILE_M pixels and TILE_N filters a block; TILE_K; WARPS_M, WARPS_N; STAGES
// (2 or more); SPLIT_K: how many blocks share the work of a tile, each over a part of k; ORDER: 0 neighbouring blocks
// are filters of the same pixels, 1 pixels; CHUNK: 8 where channels are a multiple of 8, else 1, which copies element
// by element; MIN_BLOCKS, what the compiler keeps registers for.
//
// With SPLIT_K > 1 each block leaves its part in `workspace` and the last one of a tile adds them in order, so that the
// result does not depend on who was last. workspace: SPLIT_K * tiles * TILE_M * TILE_N floats, and then an unsigned for
// each tile, zero before the first launch and after each. Not used with SPLIT_K = 1.
#include "common.cuh"
#include "corner.cuh"
#include "last_block.cuh"
#include "mma.cuh"

namespace {

using namespace cudasched::kernels;

#if TYPE == TYPE_FP16
using Type = Fp16;
#else
using Type = Bf16;
#endif
static_assert(TYPE != TYPE_FP32, "the tensor cores take fp16 and bf16");

constexpr int kThreads = WARPS_M * WARPS_N * kWarpThreads;
constexpr int kEight = 8;  // elements of 16 bytes
constexpr int kRowBytes = TILE_K * static_cast<int>(sizeof(Element));
constexpr int kChunks = TILE_K / kEight;
constexpr int kStep = kThreads / kChunks;  // rows of a tile that all threads copy at once
constexpr int kCopiesA = TILE_M / kStep;
constexpr int kCopiesB = TILE_N / kStep;
constexpr int kWarpM = TILE_M / WARPS_M;
constexpr int kWarpN = TILE_N / WARPS_N;
constexpr int kBands = kWarpM / 16;
constexpr int kPairs = kWarpN / 16;  // of fragments of eight filters
constexpr int kStageBytes = (TILE_M + TILE_N) * kRowBytes;
constexpr int kOutBytes = TILE_N * static_cast<int>(sizeof(Element));  // of a row of the tile of y
static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && TILE_K % 16 == 0, "fragments are 16 x 16");
static_assert(kThreads % kChunks == 0 && TILE_M % kStep == 0 && TILE_N % kStep == 0, "all threads copy equally much");
static_assert(STAGES >= 2, "one tile arrives while another is used");
static_assert(CHUNK == kEight || CHUNK == 1, "chunks are whole or single elements");

// The sizes of a convolution, as the kernel is given them.
struct Convolution {
  int images, height, width, channels;
  int filters, rows, columns;
  int out_height, out_width;
  int stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x;
};

// Where in a patch a chunk is. It moves on with the steps over k.
struct Place {
  __device__ __forceinline__ Place(int k, const Convolution& of) {
    const int spot = k / of.channels;
    channel = k % of.channels;
    row = spot / of.columns;
    column = spot % of.columns;
  }

  __device__ __forceinline__ void move(int count, const Convolution& of) {
    channel += count;
    while (channel >= of.channels) {
      channel -= of.channels;
      if (++column == of.columns) {
        column = 0;
        ++row;
      }
    }
  }

  int channel, row, column;
};

// The patch of one pixel of y: the place of its corner in x, which may lie outside.
struct Patch {
  int y, x;
  long long offset;
};

__device__ __forceinline__ Patch patch_of(int pixel, const Convolution& of) {
  const int line = pixel / of.out_width;
  const int image = line / of.out_height;
  Patch made;
  made.y = line % of.out_height * of.stride_y - of.padding_y;
  made.x = pixel % of.out_width * of.stride_x - of.padding_x;
  made.offset = ((static_cast<long long>(image) * of.height + made.y) * of.width + made.x) * of.channels;
  if (image >= of.images) made.y = -(1 << 30);  // below the last pixel: outside wherever one looks
  return made;
}

__device__ __forceinline__ bool is_inside(const Patch& patch, const Place& place, const Convolution& of) {
  return static_cast<unsigned>(patch.y + place.row * of.dilation_y) < static_cast<unsigned>(of.height) &&
         static_cast<unsigned>(patch.x + place.column * of.dilation_x) < static_cast<unsigned>(of.width) &&
         place.row < of.rows;
}

__device__ __forceinline__ long long shift_of(const Place& place, const Convolution& of) {
  return (static_cast<long long>(place.row) * of.dilation_y * of.width + place.column * of.dilation_x) * of.channels +
         place.channel;
}

// Copies chunks of x and w into tiles, step after step.
class Loader {
 public:
  __device__ __forceinline__ Loader(const Element* x, const Element* w, const Convolution& of, int pixel0, int filter0,
                                    int k0)
      : x_(x),
        w_(w),
        of_(of),
        chunk_(static_cast<int>(threadIdx.x) % kChunks),
        row_(static_cast<int>(threadIdx.x) / kChunks),
        filter_(filter0 + row_),
        depth_(of.rows * of.columns * of.channels),
        k_(k0 + chunk_ * kEight),
        place_(k_, of) {
#pragma unroll
    for (int i = 0; i < kCopiesA; ++i) patches_[i] = patch_of(pixel0 + row_ + i * kStep, of);
  }

  __device__ __forceinline__ void next(unsigned char* tile_a, unsigned char* tile_b) {
    if constexpr (CHUNK == kEight) {
      const Element* from = x_ + shift_of(place_, of_);
#pragma unroll
      for (int i = 0; i < kCopiesA; ++i) {
        copy_async<16>(tile_a + target(i), from + patches_[i].offset, is_inside(patches_[i], place_, of_) ? 16 : 0);
      }
#pragma unroll
      for (int i = 0; i < kCopiesB; ++i) {
        copy_async<16>(tile_b + target(i), filter(i), filter_ + i * kStep < of_.filters && k_ < depth_ ? 16 : 0);
      }
      place_.move(TILE_K, of_);
    } else {
      by_elements(tile_a, tile_b);
    }
    k_ += TILE_K;
  }

 private:
  __device__ __forceinline__ int target(int i) const { return swizzle<kRowBytes>(row_ + i * kStep, chunk_ * 16); }

  __device__ __forceinline__ const Element* filter(int i) const {
    return w_ + static_cast<long long>(filter_ + i * kStep) * depth_ + k_;
  }

  __device__ __forceinline__ void by_elements(unsigned char* tile_a, unsigned char* tile_b) {
    Place places = place_;
#pragma unroll
    for (int i = 0; i < kCopiesA; ++i) {
      Vector<kEight> made;
      places = place_;
      for (int j = 0; j < kEight; ++j) {
        made.at[j] = is_inside(patches_[i], places, of_) ? x_[patches_[i].offset + shift_of(places, of_)] : Element{};
        places.move(1, of_);
      }
      *reinterpret_cast<Vector<kEight>*>(tile_a + target(i)) = made;
    }
#pragma unroll
    for (int i = 0; i < kCopiesB; ++i) {
      Vector<kEight> made;
      for (int j = 0; j < kEight; ++j) {
        made.at[j] = filter_ + i * kStep < of_.filters && k_ + j < depth_ ? filter(i)[j] : Element{};
      }
      *reinterpret_cast<Vector<kEight>*>(tile_b + target(i)) = made;
    }
    place_.move(TILE_K, of_);
  }

  const Element* x_;
  const Element* w_;
  const Convolution& of_;
  int chunk_, row_, filter_, depth_, k_;
  Place place_;
  Patch patches_[kCopiesA];
};

}  // namespace

// y: images x out_height x out_width x filters; x: images x height x width x channels; w: filters x rows x columns x
// channels; bias: filters, or null. All contiguous, from multiples of 16 bytes. images * out_height * out_width and
// rows * columns * channels are below 2^31.
//
// Grid: tiles of pixels * tiles of filters, 1, SPLIT_K. Dynamic shared memory: STAGES * (TILE_M + TILE_N) * TILE_K
// elements, or TILE_M * TILE_N if that is more.
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    conv2d(Element* __restrict__ y, const Element* __restrict__ x, const Element* __restrict__ w,
           const Element* __restrict__ bias, float* workspace, int images, int height, int width, int channels,
           int filters, int rows, int columns, int out_height, int out_width, int stride_y, int stride_x, int padding_y,
           int padding_x, int dilation_y, int dilation_x) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Convolution of{images,    height,   width,    channels,  filters,   rows,       columns,   out_height,
                       out_width, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x};
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int warp_m = warp / WARPS_N * kWarpM;
  const int warp_n = warp % WARPS_N * kWarpN;
  const int pixels = images * out_height * out_width;
  const int tiles_m = (pixels + TILE_M - 1) / TILE_M;
  const int tiles_n = (filters + TILE_N - 1) / TILE_N;
  const int tile = static_cast<int>(blockIdx.x);
  const int pixel0 = (ORDER == 0 ? tile / tiles_n : tile % tiles_m) * TILE_M;
  const int filter0 = (ORDER == 0 ? tile % tiles_n : tile / tiles_m) * TILE_N;

  const int steps_all = (rows * columns * channels + TILE_K - 1) / TILE_K;
  const int steps_each = (steps_all + SPLIT_K - 1) / SPLIT_K;
  const int step_first = static_cast<int>(blockIdx.z) * steps_each;
  const int steps = min(steps_each, steps_all - step_first);  // below 1 where nothing is left for this block

  Loader loader(x, w, of, pixel0, filter0, step_first * TILE_K);
  const Corner<kRowBytes, true> corner_a(lane);
  const Corner<kRowBytes, false> corner_b(lane);
  float sums[kBands][2 * kPairs][4] = {};
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    unsigned char* to = shared + stage * kStageBytes;
    if (stage < steps) loader.next(to, to + TILE_M * kRowBytes);
    commit_copies();
  }
  int slot = 0;
  int slot_before = STAGES - 1;
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // the tiles are there, and nobody reads those of the step before any more
    if (step + STAGES - 1 < steps) {
      unsigned char* to = shared + slot_before * kStageBytes;
      loader.next(to, to + TILE_M * kRowBytes);
    }
    commit_copies();
    const unsigned char* tile_a = shared + slot * kStageBytes;
    const unsigned char* tile_b = tile_a + TILE_M * kRowBytes;
#pragma unroll
    for (int depth = 0; depth < TILE_K / 16; ++depth) {
      FragmentA<Type> a[kBands];
#pragma unroll
      for (int band = 0; band < kBands; ++band) {
        load_matrix_x4(a[band].at, corner_a.in(tile_a, warp_m + band * 16, depth * 32));
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        unsigned loaded[4];
        load_matrix_x4(loaded, corner_b.in(tile_b, warp_n + pair * 16, depth * 32));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const FragmentB<Type> b{{loaded[2 * i], loaded[2 * i + 1]}};
#pragma unroll
          for (int band = 0; band < kBands; ++band) multiply_accumulate(sums[band][2 * pair + i], a[band], b);
        }
      }
    }
    slot_before = slot;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  wait_for_copies<0>();
  __syncthreads();

#if SPLIT_K > 1
  // Parts are kept as the threads have them: the last block's threads have them alike.
  constexpr int kQuads = kBands * 2 * kPairs;
  const long long parts = static_cast<long long>(gridDim.x) * kQuads * kThreads;
  float4* part = reinterpret_cast<float4*>(workspace) + static_cast<long long>(tile) * kQuads * kThreads + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float(&quad)[4] = sums[i / (2 * kPairs)][i % (2 * kPairs)];
    part[blockIdx.z * parts + i * kThreads] = make_float4(quad[0], quad[1], quad[2], quad[3]);
  }
  auto* arrived = reinterpret_cast<unsigned*>(workspace + SPLIT_K * parts * 4) + tile;
  if (!is_last_block(arrived, SPLIT_K)) return;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    float(&quad)[4] = sums[i / (2 * kPairs)][i % (2 * kPairs)];
    quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
    for (int other = 0; other < SPLIT_K; ++other) {
      const float4 one = __ldcg(part + other * parts + i * kThreads);
      quad[0] += one.x;
      quad[1] += one.y;
      quad[2] += one.z;
      quad[3] += one.w;
    }
  }
#endif

  // The tile of y, by way of shared memory, so that it is written 16 bytes at a time.
#pragma unroll
  for (int n = 0; n < 2 * kPairs; ++n) {
    const int column = warp_n + n * 8 + lane % 4 * 2;
    float added[2] = {};
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (filter0 + column + i < filters) added[i] = to_float(bias[filter0 + column + i]);
      }
    }
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_m + band * 16 + half * 8 + lane / 4;
        *reinterpret_cast<unsigned*>(shared + swizzle<kOutBytes>(row, column * 2)) =
            pack<Type>(sums[band][n][2 * half] + added[0], sums[band][n][2 * half + 1] + added[1]);
      }
    }
  }
  __syncthreads();
  constexpr int kOutChunks = TILE_N / kEight;
  for (int index = static_cast<int>(threadIdx.x); index < TILE_M * kOutChunks; index += kThreads) {
    const int row = index / kOutChunks;
    const int column = index % kOutChunks * kEight;
    const int count = min(filters - filter0 - column, kEight);
    if (pixel0 + row >= pixels || count <= 0) continue;
    const auto* from = reinterpret_cast<const Element*>(shared + swizzle<kOutBytes>(row, column * 2));
    Element* to = y + static_cast<long long>(pixel0 + row) * filters + filter0 + column;
    if (filters % kEight == 0) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int i = 0; i < count; ++i) to[i] = from[i];
    }
  }
}
