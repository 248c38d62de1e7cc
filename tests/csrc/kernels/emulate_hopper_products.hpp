// The functions of csrc/kernels/hopper_products.cuh on the host, as emulate_hopper.hpp has the others: shared memory is
// read at once where `eager_reads` is set, else at the wait for the products; until then a fragment may not change.
#pragma once

namespace cudasched::kernels {

namespace emulated {

// d (+)= a * b for what a lane has of d; a_at(half, k) and b_at(column, k) give the operands.
template <int Count, typename A, typename B>
void multiply_lane(float (&d)[Count], bool accumulate, A&& a_at, B&& b_at) {
  const int lane = static_cast<int>(emulate::running % 32);
  float rows[2][16];
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < 16; ++k) rows[half][k] = a_at(half, k);
  }
  for (int j = 0; j < Count / 4; ++j) {
    for (int odd = 0; odd < 2; ++odd) {
      double sums[2] = {};
      for (int k = 0; k < 16; ++k) {
        const float value = b_at(8 * j + 2 * (lane % 4) + odd, k);
        for (int half = 0; half < 2; ++half) sums[half] += static_cast<double>(rows[half][k]) * value;
      }
      for (int half = 0; half < 2; ++half) {
        float& sum = d[4 * j + 2 * half + odd];
        sum = static_cast<float>((accumulate ? static_cast<double>(sum) : 0.0) + sums[half]);
      }
    }
  }
}

template <typename Type>
float number_at(unsigned long long descriptor, int line, int depth, bool by_lines) {
  const unsigned place = emulate::place_of(descriptor, line, depth, by_lines);
  return value_of(emulate::element_at(place, emulate::own_rank()), 0, Type{});
}

}  // namespace emulated

template <int Count, typename Type>
void multiply_by_columns(float (&d)[Count], unsigned long long a, unsigned long long b, int accumulate, Type) {
  static_assert((Count % 8 == 0 && Count >= 16 && Count <= 96) || Count == 128, "the shapes that there are");
  emulate::begin(emulate::products[emulate::running], [=, &d] {
    const int row = static_cast<int>(emulate::running / 32 % 4 * 16 + emulate::running % 32 / 4);
    emulated::multiply_lane(
        d, accumulate != 0, [&](int half, int k) { return emulated::number_at<Type>(a, row + 8 * half, k, false); },
        [&](int column, int k) { return emulated::number_at<Type>(b, column, k, false); });
  });
}

template <int Count, typename Type>
void multiply_held(float (&d)[Count], const FragmentA<Type>& a, unsigned long long b) {
  static_assert(Count == 32 || Count == 64, "the shapes that there are");
  emulate::meet(&a, [&](auto&& offer) {
    std::array<FragmentA<Type>, 4> row;  // of the lanes that share a row
    for (unsigned i = 0; i < 4; ++i) {
      row[i] = *static_cast<const FragmentA<Type>*>(offer(emulate::running % 32 / 4 * 4 + i));
    }
    emulate::begin(emulate::products[emulate::running], [=, &d, given = a, now = &a] {
      emulate::require(std::memcmp(&given, now, sizeof given) == 0,
                       "a fragment changed before its product was waited for");
      emulated::multiply_lane(
          d, true,
          [&](int half, int k) { return emulated::value_of(row[k % 8 / 2].at[half + k / 8 * 2], k % 2, Type{}); },
          [&](int column, int k) { return emulated::number_at<Type>(b, column, k, true); });
    });
  });
}

}  // namespace cudasched::kernels
