// Each instruction of csrc/kernels/mma.cuh, as emulate_mma.hpp has it, against a plain loop. The fragment layouts are
// written out here from the tables of the PTX ISA, apart from those of the emulation. Prints what is wrong.
#include "emulate.hpp"

#define EMULATED_MMA "emulate_mma.hpp"
#include <random>
#include <set>

#include "mma.cuh"

namespace {

using namespace cudasched::kernels;

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  ++failures;
}

void by_a_warp(const std::function<void(unsigned)>& body) {
  emulate::launch({1, 1, 1}, 32, 0, [&] { body(threadIdx.x); });
}

// Row or column and depth of element `i` of A and B, as the tables of "Matrix Fragments for mma" have them.
struct Place {
  int line, depth;
};

Place place_a(Fp16, int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  const int row = (i >= 0 && i < 2) || (i >= 4 && i < 6) ? group : group + 8;
  return {row, in_group * 2 + (i & 1) + (i < 4 ? 0 : 8)};
}
Place place_b(Fp16, int lane, int i) { return {lane >> 2, lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8)}; }
Place place_a(Bf16, int lane, int i) { return place_a(Fp16{}, lane, i); }
Place place_b(Bf16, int lane, int i) { return place_b(Fp16{}, lane, i); }
Place place_a(Tf32, int lane, int i) {
  return {i == 0 || i == 2 ? lane >> 2 : (lane >> 2) + 8, i == 0 || i == 1 ? lane % 4 : lane % 4 + 4};
}
Place place_b(Tf32, int lane, int i) { return {lane >> 2, i == 0 ? lane % 4 : lane % 4 + 4}; }
Place place_a(Int8, int lane, int i) {
  const int row = (i >= 0 && i < 4) || (i >= 8 && i < 12) ? lane >> 2 : (lane >> 2) + 8;
  return {row, lane % 4 * 4 + (i & 3) + (i < 8 ? 0 : 16)};
}
Place place_b(Int8, int lane, int i) { return {lane >> 2, lane % 4 * 4 + (i & 3) + (i < 4 ? 0 : 16)}; }

unsigned bits_of(float value, Fp16) { return emulate::fp16_of_float(value); }
unsigned bits_of(float value, Bf16) { return emulate::bf16_of_float(value); }
unsigned bits_of(float value, Tf32) { return __float_as_uint(value); }
unsigned bits_of(float value, Int8) { return static_cast<unsigned>(static_cast<int>(value)) & 0xffu; }

template <typename Type, typename Result>
void test_product(const char* what) {
  constexpr int kDeep = kDepth<Type>;
  constexpr int kPerRegister = kDeep / 8;
  std::mt19937 random(1);
  std::uniform_int_distribution<int> integer(-8, 8);  // exact in all of the types
  float a[16][kDeep], b[kDeep][8];
  Result c[16][8], found[16][8] = {};
  for (auto& row : a)
    for (float& value : row) value = static_cast<float>(integer(random));
  for (auto& row : b)
    for (float& value : row) value = static_cast<float>(integer(random));
  for (auto& row : c)
    for (Result& value : row) value = static_cast<Result>(integer(random));
  by_a_warp([&](unsigned thread) {
    const int lane = static_cast<int>(thread);
    FragmentA<Type> part_a = {};
    FragmentB<Type> part_b = {};
    for (int i = 0; i < 4 * kPerRegister; ++i) {
      const Place place = place_a(Type{}, lane, i);
      part_a.at[i / kPerRegister] |= bits_of(a[place.line][place.depth], Type{})
                                     << (32 / kPerRegister * (i % kPerRegister));
    }
    for (int i = 0; i < 2 * kPerRegister; ++i) {
      const Place place = place_b(Type{}, lane, i);
      part_b.at[i / kPerRegister] |= bits_of(b[place.depth][place.line], Type{})
                                     << (32 / kPerRegister * (i % kPerRegister));
    }
    Result d[4];
    const auto row = [&](int i) { return i < 2 ? lane >> 2 : (lane >> 2) + 8; };
    const auto column = [&](int i) { return lane % 4 * 2 + (i & 1); };
    for (int i = 0; i < 4; ++i) d[i] = c[row(i)][column(i)];
    multiply_accumulate(d, part_a, part_b);
    for (int i = 0; i < 4; ++i) found[row(i)][column(i)] = d[i];
  });
  bool right = true;
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      Result sum = c[i][j];
      for (int k = 0; k < kDeep; ++k) sum += static_cast<Result>(a[i][k] * b[k][j]);
      right &= sum == found[i][j];
    }
  }
  expect(right, what);
}

void test_special_values() {
  expect(round_to_tf32(0x3f801000u) == 0x3f802000u, "halves are rounded away from zero");
  expect(round_to_tf32(0x3f800fffu) == 0x3f800000u, "less than a half is rounded to zero");
  expect(pack<Fp16>(1.0f, -2.0f) == 0xc0003c00u, "fp16: the lower column is in the lower half");
  expect(pack<Bf16>(1.0f, -2.0f) == 0xc0003f80u, "bf16: the lower column is in the lower half");
  int sums[4] = {};
  by_a_warp([&](unsigned thread) {
    FragmentA<Int8> a = {0x80808080u, 0x80808080u, 0x80808080u, 0x80808080u};
    FragmentB<Int8> b = {0x7f7f7f7fu, 0x7f7f7f7fu};
    int d[4] = {};
    multiply_accumulate(d, a, b);
    if (thread == 5) std::copy(d, d + 4, sums);
  });
  expect(sums[3] == -128 * 127 * 32, "int8 is signed");
  float value = 0;
  by_a_warp([&](unsigned thread) {
    const unsigned one_and_some = 0x3f801fffu;  // the last 13 bits are not looked at
    FragmentA<Tf32> a = {one_and_some, one_and_some, one_and_some, one_and_some};
    FragmentB<Tf32> b = {0x3f800000u, 0x3f800000u};
    float d[4] = {};
    multiply_accumulate(d, a, b);
    if (thread == 0) value = d[0];
  });
  expect(value == 8.0f, "tf32 has ten bits behind the point");
}

template <int Count>
void test_loads(const char* what) {
  alignas(16) unsigned short stored[4][8][8];  // of each matrix, in an order of rows of its own
  for (int i = 0; i < 4 * 64; ++i) (&stored[0][0][0])[i] = static_cast<unsigned short>(i);
  const auto row_of = [&](unsigned matrix, unsigned row) { return stored[matrix][row ^ matrix]; };
  bool right = true;
  by_a_warp([&](unsigned lane) {
    const void* given = lane < 8 * Count ? row_of(lane / 8, lane % 8) : nullptr;
    unsigned plain[Count], turned[Count];
    if constexpr (Count == 4) {
      load_matrix_x4(plain, given);
      load_matrix_x4_transposed(turned, given);
    } else {
      load_matrix_x2(plain, given);
      load_matrix_x2_transposed(turned, given);
    }
    for (unsigned i = 0; i < Count; ++i) {
      const unsigned line = lane / 4, first = lane % 4 * 2;
      right &= plain[i] == (row_of(i, line)[first] | static_cast<unsigned>(row_of(i, line)[first + 1]) << 16);
      right &= turned[i] == (row_of(i, first)[line] | static_cast<unsigned>(row_of(i, first + 1)[line]) << 16);
    }
  });
  expect(right, what);
}

// What the head of mma.cuh says of x4 and x2: an A from rows, a B from columns, a B from rows.
void test_a_product_of_matrices_in_memory() {
  alignas(16) unsigned short a[16][16], b[16][8], turned[8][16];
  float found[2][16][8];
  std::mt19937 random(2);
  std::uniform_int_distribution<int> integer(-8, 8);
  const auto fill = [&](unsigned short& bits) { bits = emulate::bf16_of_float(static_cast<float>(integer(random))); };
  for (auto& row : a)
    for (auto& bits : row) fill(bits);
  for (int k = 0; k < 16; ++k) {
    for (int j = 0; j < 8; ++j) fill(b[k][j]), turned[j][k] = b[k][j];
  }
  by_a_warp([&](unsigned lane) {
    FragmentA<Bf16> part_a;
    FragmentB<Bf16> part_b[2];
    load_matrix_x4(part_a.at, reinterpret_cast<const char*>(a[lane % 16]) + lane / 16 * 16);
    load_matrix_x2_transposed(part_b[0].at, b[lane % 16]);
    load_matrix_x2(part_b[1].at, reinterpret_cast<const char*>(turned[lane % 8]) + lane / 8 % 2 * 16);
    for (int way = 0; way < 2; ++way) {
      float d[4] = {};
      multiply_accumulate(d, part_a, part_b[way]);
      for (unsigned i = 0; i < 4; ++i) found[way][lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2] = d[i];
    }
  });
  bool right = true;
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += emulate::float_of_bf16(a[i][k]) * emulate::float_of_bf16(b[k][j]);
      right &= sum == found[0][i][j] && sum == found[1][i][j];
    }
  }
  expect(right, "a product of matrices in memory");
}

void test_copies() {
  alignas(16) static unsigned char from[64], to[64];
  for (unsigned i = 0; i < 64; ++i) from[i] = static_cast<unsigned char>(i + 1);
  for (const bool eager : {false, true}) {
    emulate::eager_copies = eager;
    std::memset(to, 0xee, sizeof to);
    by_a_warp([&](unsigned lane) {
      if (lane != 3) return;
      copy_async<16>(to, from);
      commit_copies();
      copy_async<16>(to + 16, from + 16, 6);
      copy_async<4>(to + 32, nullptr, 0);
      commit_copies();
      copy_async<8>(to + 48, from + 48);
      commit_copies();
      expect((to[0] == 1) == eager, "a copy is not done before it is waited for");
      wait_for_copies<2>();
      expect(to[0] == 1 && to[15] == 16, "the oldest group is done");
      expect((to[16] == 17) == eager, "a later group need not be done");
      wait_for_copies<1>();
      expect(to[21] == 22 && to[22] == 0 && to[31] == 0, "bytes that are not read are zeros");
      expect(to[32] == 0 && to[35] == 0 && to[36] == 0xee, "a copy of nothing writes zeros");
      wait_for_copies<0>();
      expect(to[48] == 49 && to[55] == 56, "the last group is done");
    });
  }
  emulate::eager_copies = false;
  std::memset(to, 0xee, sizeof to);
  by_a_warp([&](unsigned lane) {
    if (lane == 0) copy_async<16>(to, from), commit_copies();
  });
  by_a_warp([&](unsigned lane) {
    if (lane == 0) wait_for_copies<0>();
  });
  expect(to[0] == 0xee, "a copy that its block did not wait for is not done by the next");
}

template <int RowBytes>
void test_swizzle(const char* what) {
  std::set<int> places;
  bool right = true;
  for (int row = 0; row < 32; ++row) {
    for (int byte = 0; byte < RowBytes; ++byte) {
      const int place = swizzle<RowBytes>(row, byte);
      right &= place >= 0 && place < 32 * RowBytes && place % 16 == byte % 16;
      places.insert(place);
    }
  }
  right &= places.size() == 32u * RowBytes;
  for (int row = 0; row < 32; row += 8) {  // what one matrix of ldmatrix reads
    for (int byte = 0; byte < RowBytes; byte += 16) {
      std::set<int> banks;
      for (int i = 0; i < 8; ++i) banks.insert(swizzle<RowBytes>(row + i, byte) % 128);
      right &= banks.size() == 8;
    }
  }
  expect(right, what);
}

}  // namespace

int main() {
  test_product<Fp16, float>("fp16");
  test_product<Bf16, float>("bf16");
  test_product<Tf32, float>("tf32");
  test_product<Int8, int>("int8");
  test_special_values();
  test_loads<4>("ldmatrix x4");
  test_loads<2>("ldmatrix x2");
  test_a_product_of_matrices_in_memory();
  test_copies();
  test_swizzle<16>("rows of 16 bytes");
  test_swizzle<32>("rows of 32 bytes");
  test_swizzle<64>("rows of 64 bytes");
  test_swizzle<128>("rows of 128 bytes");
  test_swizzle<256>("rows of 256 bytes");
  test_swizzle<384>("rows of 384 bytes");
  return failures != 0;
}
