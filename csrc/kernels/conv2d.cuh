// The convolutions' shared parts: a block's part of the work, the pixels of a patch, the copies of chunks into tiles,
// and the stores of the sums. A patch is the part of x that makes one pixel of y.
//
// Parameters (macros): TYPE, TILE_M, TILE_N, TILE_K, SPLIT_K, ORDER, CHUNK; conv2d.cu explains these.
#pragma once

#include "common.cuh"
#include "last_block.cuh"
#include "mma.cuh"

namespace cudasched::kernels {

#if TYPE == TYPE_FP16
using Type = Fp16;
#else
using Type = Bf16;
#endif
static_assert(TYPE != TYPE_FP32, "the tensor cores take fp16 and bf16");

constexpr int kEight = 8;  // elements of 16 bytes
constexpr int kRowBytes = TILE_K * static_cast<int>(sizeof(Element));
constexpr int kChunks = TILE_K / kEight;
constexpr int kTileBytesA = TILE_M * kRowBytes;
constexpr int kStageBytes = (TILE_M + TILE_N) * kRowBytes;
constexpr int kOutBytes = TILE_N * static_cast<int>(sizeof(Element));  // of a row of the tile of y
static_assert(CHUNK == kEight || CHUNK == 1, "chunks are whole or single elements");

// The sizes of a convolution, as the kernel is given them.
struct Convolution {
  int images, height, width, channels;
  int filters, rows, columns;
  int out_height, out_width;
  int stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x;
};

// A chunk's place in a patch, which moves on with the steps over k.
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

// As copy_async<16>, through the L1 as well, which may hold the shared parts of neighbouring pixels' patches.
__device__ __forceinline__ void copy_async_by_l1(void* shared, const void* global, int valid) {
#ifdef EMULATED
  copy_async<16>(shared, global, valid);
#else
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid)
               : "memory");
#endif
}

// Copies chunks of x and w into tiles, step after step. `ByL1`: those of x.
template <int Threads, bool ByL1 = false>
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
        if constexpr (ByL1) {
          copy_async_by_l1(tile_a + target(i), from + patches_[i].offset, is_inside(patches_[i], place_, of_) ? 16 : 0);
        } else {
          copy_async<16>(tile_a + target(i), from + patches_[i].offset, is_inside(patches_[i], place_, of_) ? 16 : 0);
        }
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
  static constexpr int kStep = Threads / kChunks;  // rows of a tile that all threads copy at once
  static constexpr int kCopiesA = TILE_M / kStep;
  static constexpr int kCopiesB = TILE_N / kStep;
  static_assert(Threads % kChunks == 0 && TILE_M % kStep == 0 && TILE_N % kStep == 0, "all threads copy equally much");

  __device__ __forceinline__ int target(int i) const { return swizzle<kRowBytes>(row_ + i * kStep, chunk_ * 16); }

  __device__ __forceinline__ const Element* filter(int i) const {
    return w_ + static_cast<long long>(filter_ + i * kStep) * depth_ + k_;
  }

  // Compiled small: the loop is bound by its loads, and there may be many copies a thread.
  __device__ __forceinline__ void by_elements(unsigned char* tile_a, unsigned char* tile_b) {
#pragma unroll
    for (int i = 0; i < kCopiesA; ++i) {
      auto* to = reinterpret_cast<Element*>(tile_a + target(i));
      Place place = place_;
#pragma unroll 1
      for (int j = 0; j < kEight; ++j) {
        to[j] = is_inside(patches_[i], place, of_) ? x_[patches_[i].offset + shift_of(place, of_)] : Element{};
        place.move(1, of_);
      }
    }
#pragma unroll 1
    for (int i = 0; i < kCopiesB; ++i) {
      auto* to = reinterpret_cast<Element*>(tile_b + target(i));
#pragma unroll 1
      for (int j = 0; j < kEight; ++j) {
        to[j] = filter_ + i * kStep < of_.filters && k_ + j < depth_ ? filter(i)[j] : Element{};
      }
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

// The part of the work that this block has: a tile, and some of the steps over k.
struct Work {
  __device__ __forceinline__ explicit Work(const Convolution& of) {
    pixels = of.images * of.out_height * of.out_width;
    tile = static_cast<int>(blockIdx.x);
    const int tiles_m = (pixels + TILE_M - 1) / TILE_M;
    const int tiles_n = (of.filters + TILE_N - 1) / TILE_N;
    pixel0 = (ORDER == 0 ? tile / tiles_n : tile % tiles_m) * TILE_M;
    filter0 = (ORDER == 0 ? tile % tiles_n : tile / tiles_m) * TILE_N;
    const int steps_all = (of.rows * of.columns * of.channels + TILE_K - 1) / TILE_K;
    const int steps_each = (steps_all + SPLIT_K - 1) / SPLIT_K;
    const int first = static_cast<int>(blockIdx.z) * steps_each;
    k0 = first * TILE_K;
    steps = min(steps_each, steps_all - first);
  }

  int pixels, tile, pixel0, filter0, k0;
  int steps;  // below 1 where nothing is left for this block
};

// Adds the parts of a tile that several blocks share; false in all but the last of these, which has the sums. A thread
// has `Quads` fragments of four sums each, at at(i).
template <int Threads, int Quads, typename At>
__device__ __forceinline__ bool add_parts(float* workspace, int tile, At&& at) {
  if constexpr (SPLIT_K > 1) {
    // Parts are stored in the threads' order, which is the same in the last block.
    const long long all = static_cast<long long>(gridDim.x) * Quads * Threads;
    float4* part = reinterpret_cast<float4*>(workspace) + static_cast<long long>(tile) * Quads * Threads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < Quads; ++i) {
      const float* quad = at(i);
      part[blockIdx.z * all + i * Threads] = make_float4(quad[0], quad[1], quad[2], quad[3]);
    }
    auto* arrived = reinterpret_cast<unsigned*>(workspace + SPLIT_K * all * 4) + tile;
    if (!is_last_block(arrived, SPLIT_K)) return false;
#pragma unroll
    for (int i = 0; i < Quads; ++i) {
      float* quad = at(i);
      quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
      for (int other = 0; other < SPLIT_K; ++other) {
        const float4 one = __ldcg(part + other * all + i * Threads);
        quad[0] += one.x;
        quad[1] += one.y;
        quad[2] += one.z;
        quad[3] += one.w;
      }
    }
  }
  return true;
}

// The bias for the two sums of a lane from `filter` on.
__device__ __forceinline__ void add_bias(float (&added)[2], const Element* bias, int filter, int filters) {
  if (bias == nullptr) return;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (filter + j < filters) added[j] = to_float(bias[filter + j]);
  }
}

// Writes the tile of y from the registers, two sums at a time. The fragments are those of write_tile.
template <int Quads, typename At, typename RowOf, typename ColumnOf>
__device__ __forceinline__ void write_pairs(Element* y, const Element* bias, const Work& work, int filters, At&& at,
                                            RowOf&& row_of, ColumnOf&& column_of) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int i = 0; i < Quads; ++i) {
    const float* quad = at(i);
    const int filter = work.filter0 + column_of(i) + lane % 4 * 2;
    float added[2] = {};
    add_bias(added, bias, filter, filters);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pixel = work.pixel0 + row_of(i) + half * 8 + lane / 4;
      if (pixel >= work.pixels || filter >= filters) continue;
      Element* to = y + static_cast<long long>(pixel) * filters + filter;
      const unsigned pair = pack<Type>(quad[2 * half] + added[0], quad[2 * half + 1] + added[1]);
      if (filters % 2 == 0) {
        *reinterpret_cast<unsigned*>(to) = pair;
      } else {
        to[0] = static_cast<Element>(pair);
        if (filter + 1 < filters) to[1] = static_cast<Element>(pair >> 16);
      }
    }
  }
}

// Writes the tile of y by way of shared memory, 16 bytes at a time. Fragment `i` has the 16 rows from row(i) on and the
// 8 columns from column(i) on, as mma.cuh lays out a C.
template <int Threads, int Quads, typename At, typename RowOf, typename ColumnOf>
__device__ __forceinline__ void write_tile(Element* y, const Element* bias, unsigned char* shared, const Work& work,
                                           int filters, At&& at, RowOf&& row_of, ColumnOf&& column_of) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int i = 0; i < Quads; ++i) {
    const float* quad = at(i);
    const int column = column_of(i) + lane % 4 * 2;
    float added[2] = {};
    add_bias(added, bias, work.filter0 + column, filters);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<unsigned*>(shared + swizzle<kOutBytes>(row_of(i) + half * 8 + lane / 4, column * 2)) =
          pack<Type>(quad[2 * half] + added[0], quad[2 * half + 1] + added[1]);
    }
  }
  __syncthreads();
  constexpr int kOutChunks = TILE_N / kEight;
  for (int index = static_cast<int>(threadIdx.x); index < TILE_M * kOutChunks; index += Threads) {
    const int row = index / kOutChunks;
    const int column = index % kOutChunks * kEight;
    const int count = min(filters - work.filter0 - column, kEight);
    if (work.pixel0 + row >= work.pixels || count <= 0) continue;
    const auto* from = reinterpret_cast<const Element*>(shared + swizzle<kOutBytes>(row, column * 2));
    Element* to = y + static_cast<long long>(work.pixel0 + row) * filters + work.filter0 + column;
    if (filters % kEight == 0) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int i = 0; i < count; ++i) to[i] = from[i];
    }
  }
}

}  // namespace cudasched::kernels
