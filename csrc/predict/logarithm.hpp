// The logarithm of the trees' features.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace cudasched::predict {

// Base 2, with straight lines between the powers of two; 0 for 0. A float's bits are its logarithm: exponent, then
// mantissa. A nanosecond, and a tree asks only for order.
inline float log2_of(std::uint64_t value) noexcept {
  const auto real = static_cast<float>(static_cast<std::int64_t>(std::max<std::uint64_t>(value, 1)));
  return static_cast<float>(std::bit_cast<std::int32_t>(real) - 0x3f80'0000) * 0x1p-23F;
}

}  // namespace cudasched::predict
