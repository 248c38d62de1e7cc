// The shared parts of the flash attention kernels beside their products: exponentials, and the shift of a row of
// scores.
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

// The same by multiplications and additions alone, which other units compute. 2^n comes from the exponent's bits, the
// rest from a polynomial, within a relative error of 3e-6. For values up to 127; NaN gives NaN.
__device__ __forceinline__ float exponential2_by_polynomial(float value) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with this constant has no fraction
  const float rounded = value + kRound;
  const float rest = value - (rounded - kRound);
  float made = fmaf(0.00957010142f, rest, 0.0559178603f);
  made = fmaf(made, rest, 0.240247448f);
  made = fmaf(made, rest, 0.693121815f);
  made = fmaf(made, rest, 0.999999261f);
  made *= __uint_as_float((__float_as_uint(rounded) << 23) + 0x3f800000u);
  return value < -126.0f ? 0.0f : made;
}

// The value that is subtracted from the scores of a row, times scale2. Before the first score, the difference of two
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
