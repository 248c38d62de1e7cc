// The functions of csrc/kernels/mma.cuh on the host. Included by it, after emulate.hpp: compile with
// -DEMULATED_MMA='"emulate_mma.hpp"'.
//
// A copy is done at the wait for its group, or at once where `eager_copies` is set: a kernel that waits too little
// reads what was there before in the one case, one that begins copies too early writes over what is still read in the
// other.
#pragma once

#include <array>
#include <cstring>
#include <deque>

namespace emulate {

inline bool eager_copies = false;
inline long bank_conflicts = 0;  // loads of an 8 x 8 matrix of which two rows are in the same banks

struct Copy {
  void* to;
  const void* from;
  int bytes, valid;
  void run() const {
    if (valid > 0) std::memcpy(to, from, static_cast<std::size_t>(valid));
    std::memset(static_cast<char*>(to) + valid, 0, static_cast<std::size_t>(bytes - valid));
  }
};

// What a thread has begun to copy: the last group is open.
struct Copies {
  unsigned long block = 0;
  std::deque<std::vector<Copy>> groups{1};
};
inline std::array<Copies, 2048> copies;
inline std::array<const void*, 2048> offered;

// This thread's copies; those of an earlier block are forgotten.
inline Copies& own_copies() {
  Copies& own = copies[running];
  if (own.block != blocks_run) own = {blocks_run, std::deque<std::vector<Copy>>(1)};
  return own;
}

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "emulate: %s\n", what);
  std::abort();
}

inline bool is_aligned(const void* address, std::size_t to) {
  return reinterpret_cast<std::uintptr_t>(address) % to == 0;
}

// Each lane offers an address; read(lane's) gives what another lane has offered, until all lanes have read.
template <typename Read>
void meet(const void* offer, Read&& read) {
  offered[running] = offer;
  wait(1);
  const unsigned first = running / 32 * 32;
  read([first](unsigned lane) { return offered[first + lane]; });
  wait(1);
}

inline float float_of_tf32(unsigned bits) {
  bits &= ~0x1fffu;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace emulate

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = a | static_cast<unsigned long long>(b) << 32;
  unsigned made = 0;
  for (int i = 0; i < 4; ++i) made |= static_cast<unsigned>(both >> (selector >> 4 * i & 7u) * 8 & 0xffu) << 8 * i;
  return made;
}

namespace cudasched::kernels {

template <int Bytes>
void copy_async(void* shared, const void* global, int valid = Bytes) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "what cp.async copies");
  emulate::require(valid >= 0 && valid <= Bytes, "a copy of more or fewer bytes than there are");
  emulate::require(emulate::is_aligned(shared, Bytes), "the target of a copy is not aligned");
  emulate::require(valid == 0 || emulate::is_aligned(global, Bytes), "the source of a copy is not aligned");
  const emulate::Copy copy{shared, global, Bytes, valid};
  if (emulate::eager_copies) return copy.run();
  emulate::own_copies().groups.back().push_back(copy);
}

inline void commit_copies() { emulate::own_copies().groups.emplace_back(); }

template <int Groups>
void wait_for_copies() {
  auto& groups = emulate::own_copies().groups;
  while (groups.size() > Groups + 1) {
    for (const emulate::Copy& copy : groups.front()) copy.run();
    groups.pop_front();
  }
}

namespace emulated {

template <int Count, bool Transposed>
void load_matrix(unsigned (&registers)[Count], const void* shared) {
  const unsigned lane = emulate::running % 32;
  if (lane < 8 * Count) emulate::require(emulate::is_aligned(shared, 16), "a row of ldmatrix is not aligned");
  unsigned short loaded[Count][2];
  emulate::meet(shared, [&](auto&& offer) {
    for (unsigned matrix = 0; matrix < Count; ++matrix) {
      unsigned banks = 0;
      for (unsigned row = 0; row < 8; ++row) {
        banks |= 1u << reinterpret_cast<std::uintptr_t>(offer(8 * matrix + row)) / 16 % 8;
      }
      if (lane == 0 && banks != 0xffu) ++emulate::bank_conflicts;
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned row = Transposed ? 2 * (lane % 4) + i : lane / 4;
        const unsigned column = Transposed ? lane / 4 : 2 * (lane % 4) + i;
        std::memcpy(&loaded[matrix][i], static_cast<const char*>(offer(8 * matrix + row)) + 2 * column, 2);
      }
    }
  });
  for (int i = 0; i < Count; ++i) registers[i] = loaded[i][0] | static_cast<unsigned>(loaded[i][1]) << 16;
}

template <typename Type>
constexpr int kElements = kDepth<Type> / 8;  // in a register

// Element `i` of a register.
inline float value_of(unsigned word, int i, Fp16) {
  return emulate::float_of_fp16(static_cast<unsigned short>(word >> 16 * i));
}
inline float value_of(unsigned word, int i, Bf16) {
  return emulate::float_of_bf16(static_cast<unsigned short>(word >> 16 * i));
}
inline float value_of(unsigned word, int, Tf32) { return emulate::float_of_tf32(word); }
inline int value_of(unsigned word, int i, Int8) { return static_cast<signed char>(word >> 8 * i); }

inline float sum_of(float before, double products, float) { return static_cast<float>(before + products); }
inline int sum_of(int before, long long products, int) {
  return static_cast<int>(static_cast<unsigned>(before) + static_cast<unsigned>(products));
}

template <typename Type, typename Wide, typename Result>
void multiply(Result (&d)[4], const FragmentA<Type>& a, const FragmentB<Type>& b) {
  constexpr int kE = kElements<Type>;
  const int lane = static_cast<int>(emulate::running % 32);
  struct Both {
    const FragmentA<Type>* a;
    const FragmentB<Type>* b;
  } both{&a, &b};
  Result sums[4];
  emulate::meet(&both, [&](auto&& offer) {
    const auto of = [&](int other) { return static_cast<const Both*>(offer(static_cast<unsigned>(other))); };
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2);
      const int column = 2 * (lane % 4) + i % 2;
      Wide sum = 0;
      for (int k = 0; k < kDepth<Type>; ++k) {
        const int among = k % (4 * kE) / kE;  // of the four lanes of a row or column
        const unsigned from_a = of(row % 8 * 4 + among)->a->at[row / 8 + 2 * (k / (4 * kE))];
        const unsigned from_b = of(column * 4 + among)->b->at[k / (4 * kE)];
        sum += static_cast<Wide>(value_of(from_a, k % kE, Type{})) * value_of(from_b, k % kE, Type{});
      }
      sums[i] = sum_of(d[i], sum, Result{});
    }
  });
  std::copy(sums, sums + 4, d);
}

}  // namespace emulated

inline void load_matrix_x4(unsigned (&registers)[4], const void* shared) {
  emulated::load_matrix<4, false>(registers, shared);
}
inline void load_matrix_x4_transposed(unsigned (&registers)[4], const void* shared) {
  emulated::load_matrix<4, true>(registers, shared);
}
inline void load_matrix_x2(unsigned (&registers)[2], const void* shared) {
  emulated::load_matrix<2, false>(registers, shared);
}
inline void load_matrix_x2_transposed(unsigned (&registers)[2], const void* shared) {
  emulated::load_matrix<2, true>(registers, shared);
}

inline void multiply_accumulate(float (&d)[4], const FragmentA<Fp16>& a, const FragmentB<Fp16>& b) {
  emulated::multiply<Fp16, double>(d, a, b);
}
inline void multiply_accumulate(float (&d)[4], const FragmentA<Bf16>& a, const FragmentB<Bf16>& b) {
  emulated::multiply<Bf16, double>(d, a, b);
}
inline void multiply_accumulate(float (&d)[4], const FragmentA<Tf32>& a, const FragmentB<Tf32>& b) {
  emulated::multiply<Tf32, double>(d, a, b);
}
inline void multiply_accumulate(int (&d)[4], const FragmentA<Int8>& a, const FragmentB<Int8>& b) {
  emulated::multiply<Int8, long long>(d, a, b);
}

inline unsigned round_to_tf32(unsigned bits) {
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits;  // infinities and NaNs
  return (bits + 0x1000u) & ~0x1fffu;
}

template <typename Type>
unsigned pack(float low, float high);
template <>
inline unsigned pack<Fp16>(float low, float high) {
  return emulate::fp16_of_float(low) | static_cast<unsigned>(emulate::fp16_of_float(high)) << 16;
}
template <>
inline unsigned pack<Bf16>(float low, float high) {
  return emulate::bf16_of_float(low) | static_cast<unsigned>(emulate::bf16_of_float(high)) << 16;
}

}  // namespace cudasched::kernels
