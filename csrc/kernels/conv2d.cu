// Convolution of images, y[n, p, q, f] = bias[f] + sum over r, s, c of x[n, p * stride + r * dilation - padding, ...,
// c] * w[f, r, s, c], in fp16 or bf16 with fp32 sums, on the tensor cores of sm_80 and later (mma.sync). Channels are
// last.
//
// It is a matrix product of the pixels of y (m of them, images * out_height * out_width) and the filters, over k = rows
// * columns * channels. The matrix of patches is never made: a thread copies chunks of eight channels of pixels whose
//   places it computes itself. The corners of a thread's patches are known from the beginning, and from step to step
//   the place in the patch moves on by additions.
//
// Parameters: TYPE (TYPE_FP16, TYPE_BF16); TILE_M pixels and TILE_N filters a block; TILE_K; WARPS_M, WARPS_N; STAGES
// (2 or more); SPLIT_K: how many blocks share the work of a tile, each over a part of k; ORDER: 0 neighbouring blocks
// are filters of the same pixels, 1 pixels; CHUNK: 8 where channels are a multiple of 8, else 1, which copies element
// by element; MIN_BLOCKS, the blocks that the compiler leaves registers for.
//
// With SPLIT_K > 1 each block leaves its part in `workspace`. The last block of a tile adds the parts in order, so that
// the result does not depend on which was last. workspace: SPLIT_K * tiles * TILE_M * TILE_N floats, and then an
// unsigned for each tile, zero before the first launch and after each. Not used with SPLIT_K = 1.
#include "conv2d.cuh"
#include "corner.cuh"

namespace {

using namespace cudasched::kernels;

constexpr int kThreads = WARPS_M * WARPS_N * kWarpThreads;
constexpr int kWarpM = TILE_M / WARPS_M;
constexpr int kWarpN = TILE_N / WARPS_N;
constexpr int kBands = kWarpM / 16;
constexpr int kPairs = kWarpN / 16;  // of fragments of eight filters
static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && TILE_K % 16 == 0, "fragments are 16 x 16");
static_assert(STAGES >= 2, "one tile arrives while another is used");

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
  const Work work(of);
  Loader<kThreads> loader(x, w, of, work.pixel0, work.filter0, work.k0);
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int warp_m = warp / WARPS_N * kWarpM;
  const int warp_n = warp % WARPS_N * kWarpN;
  const Corner<kRowBytes, true> corner_a(lane);
  const Corner<kRowBytes, false> corner_b(lane);
  float sums[kBands][2 * kPairs][4] = {};
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    unsigned char* to = shared + stage * kStageBytes;
    if (stage < work.steps) loader.next(to, to + kTileBytesA);
    commit_copies();
  }
  int slot = 0;
  int slot_before = STAGES - 1;
  for (int step = 0; step < work.steps; ++step) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // the tiles are there, and no thread reads those of the step before any more
    if (step + STAGES - 1 < work.steps) {
      unsigned char* to = shared + slot_before * kStageBytes;
      loader.next(to, to + kTileBytesA);
    }
    commit_copies();
    const unsigned char* tile_a = shared + slot * kStageBytes;
    const unsigned char* tile_b = tile_a + kTileBytesA;
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

  const auto quad = [&](int i) { return sums[i / (2 * kPairs)][i % (2 * kPairs)]; };
  if (!add_parts<kThreads, kBands * 2 * kPairs>(workspace, work.tile, quad)) return;
  write_tile<kThreads, kBands * 2 * kPairs>(
      y, bias, shared, work, filters, quad, [&](int i) { return warp_m + i / (2 * kPairs) * 16; },
      [&](int i) { return warp_n + i % (2 * kPairs) * 8; });
}
