// The kernels' shared parts: element types, vector loads and stores with cache hints, reductions over a warp and over
// the warps of a row.
//
// The files of this room include nothing of CUDA's headers, which NVRTC would parse anew for each of thousands of
// configurations. Each kernel is one extern "C" function whose parameters are macros: the .toml beside the kernel lists
// these (docs/tuning.md). Kernels compile for sm_80 and later, and for a host by tests/csrc/kernels/emulate.hpp.
#pragma once

#define TYPE_FP32 0
#define TYPE_FP16 1
#define TYPE_BF16 2
#define TYPE_TF32 3
#define TYPE_INT8 4

#ifndef TYPE
#define TYPE TYPE_FP32
#endif

#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
#endif

namespace cudasched::kernels {

constexpr int kWarpThreads = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

#if TYPE == TYPE_FP32 || TYPE == TYPE_TF32
using Element = float;
#elif TYPE == TYPE_INT8
using Element = signed char;
#else
using Element = unsigned short;
#endif

__device__ __forceinline__ float to_float(float value) { return value; }

__device__ __forceinline__ float to_float(unsigned short bits) {
#if TYPE == TYPE_FP16 && defined(EMULATED)
  return emulate::float_of_fp16(bits);
#elif TYPE == TYPE_FP16
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
#endif
}

__device__ __forceinline__ void from_float(float value, float& element) { element = value; }

__device__ __forceinline__ void from_float(float value, unsigned short& element) {
#if TYPE == TYPE_FP16 && defined(EMULATED)
  element = emulate::fp16_of_float(value);
#elif TYPE == TYPE_FP16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(element) : "f"(value));
#elif defined(__CUDA_ARCH__)
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(value));
  element = static_cast<unsigned short>(pair);
#else
  const unsigned bits = __float_as_uint(value);
  element = static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// `N` elements that are read or written by one instruction of up to 16 bytes.
template <int N>
struct alignas(N * sizeof(Element)) Vector {
  static_assert(N * sizeof(Element) <= 16, "one instruction moves 16 bytes at most");
  Element at[N];
};

template <int Bytes>
struct Word;
template <>
struct Word<2> {
  using Type = unsigned short;
};
template <>
struct Word<4> {
  using Type = unsigned;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};

// Streaming: read or written once, so the line is the first to leave the cache.
template <bool Streaming, int N>
__device__ __forceinline__ Vector<N> load(const Vector<N>* from) {
  using Type = typename Word<sizeof(Vector<N>)>::Type;
  union {
    Type word;
    Vector<N> vector;
  } both;
  if constexpr (Streaming) {
    both.word = __ldcs(reinterpret_cast<const Type*>(from));
  } else {
    both.word = *reinterpret_cast<const Type*>(from);
  }
  return both.vector;
}

template <bool Streaming, int N>
__device__ __forceinline__ void store(Vector<N>* to, const Vector<N>& vector) {
  using Type = typename Word<sizeof(Vector<N>)>::Type;
  union {
    Vector<N> vector;
    Type word;
  } both;
  both.vector = vector;
  if constexpr (Streaming) {
    __stcs(reinterpret_cast<Type*>(to), both.word);
  } else {
    *reinterpret_cast<Type*>(to) = both.word;
  }
}

struct Sum {
  static __device__ __forceinline__ float neutral() { return 0.0f; }
  static __device__ __forceinline__ float combine(float a, float b) { return a + b; }
};

struct Maximum {
  static __device__ __forceinline__ float neutral() { return -__uint_as_float(0x7f800000u); }
  static __device__ __forceinline__ float combine(float a, float b) { return fmaxf(a, b); }
};

template <typename Operation>
__device__ __forceinline__ float reduce_warp(float value) {
#pragma unroll
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value = Operation::combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// The same for the `Warps` warps of a row, each of which gets the result. All threads of the block call reduce_row,
// also those of rows beyond the end. `scratch` holds `Warps` floats of this row alone, and is free again at the return.
template <typename Operation, int Warps>
__device__ __forceinline__ float reduce_row(float value, float* scratch, int warp, int lane) {
  value = reduce_warp<Operation>(value);
  if constexpr (Warps > 1) {
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    value = reduce_warp<Operation>(lane < Warps ? scratch[lane] : Operation::neutral());
    __syncthreads();
  }
  return value;
}

}  // namespace cudasched::kernels
