// What the kernels of flash attention share beside their products: exponentials, and what a row of scores is shifted
// by.
#pragma once

#include "common.cuh"

namespace cudasched::kernels {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exponential2(float value) {
#ifdef EMULATED
  return exp2f(value);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#endif
}

// What is taken from the scores of a row, times scale2. Where nothing has been seen yet, the difference of two
// infinities would be NaN.
__device__ __forceinline__ float shift_of(float maximum, float scale2) {
  return maximum == Maximum::neutral() ? 0.0f : maximum * scale2;
}

// Over the four lanes that share a row.
template <typename Operation>
__device__ __forceinline__ float reduce_quad(float value) {
  value = Operation::combine(value, __shfl_xor_sync(kAllLanes, value, 1));
  return Operation::combine(value, __shfl_xor_sync(kAllLanes, value, 2));
}

}  // namespace cudasched::kernels
