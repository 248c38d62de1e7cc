// Eight words of a parameter block at once, by AVX2: call only where has_avx2() says so.
#pragma once

#include <cstdint>

#include "base/processor.hpp"

#if defined(__x86_64__)
namespace cudasched::predict {

__attribute__((target("avx2"))) inline __m256i load_eight(const std::uint32_t* from) noexcept {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

__attribute__((target("avx2"))) inline __m256i in_all_lanes(std::uint32_t value) noexcept {
  return _mm256_set1_epi32(static_cast<int>(value));
}

__attribute__((target("avx2"))) inline __m256i are_between(__m256i values, std::uint32_t least,
                                                           std::uint32_t most) noexcept {
  const __m256i from_least = _mm256_sub_epi32(values, in_all_lanes(least));
  return _mm256_cmpeq_epi32(_mm256_min_epu32(from_least, in_all_lanes(most - least)), from_least);
}

// A bit a lane.
__attribute__((target("avx2"))) inline std::uint64_t lanes_of(__m256i mask) noexcept {
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
}

}  // namespace cudasched::predict
#endif
