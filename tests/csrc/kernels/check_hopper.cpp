// Each instruction of csrc/kernels/hopper.cuh, as emulate_hopper.hpp has it, against a plain loop. The swizzled places
// are written out here as the PTX ISA draws them, by rows and chunks, apart from those of the emulation. Prints what is
// wrong.
#include "emulate.hpp"

#define EMULATED_MMA "emulate_mma.hpp"
#define EMULATED_HOPPER "emulate_hopper.hpp"
#include <random>

#include "hopper.cuh"

namespace {

using namespace cudasched::kernels;

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  ++failures;
}

// Of the element (row, column) of a box of 64 columns of two bytes.
int swizzled(int row, int column) { return row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2; }

char* aligned(char* memory) { return memory + (1024 - shared_address(memory) % 1024) % 1024; }

float random_value() {
  static std::mt19937 random(1);
  return static_cast<float>(std::uniform_int_distribution<int>(-8, 8)(random));  // exact in bf16
}

// A of 64 x 64 by rows along k, and B of 64 x N by rows along n, in boxes; all slices of 16 of k.
template <int N>
void test_product(const char* what, bool eager) {
  static float a[64][64], b[64][N], found[64][N];
  for (auto& row : a)
    for (float& value : row) value = random_value();
  for (auto& row : b)
    for (float& value : row) value = random_value();
  emulate::eager_reads = eager;
  emulate::launch({1, 1, 1}, 128, 1024 + 8192 + N / 64 * 8192, [&] {
    DYNAMIC_SHARED(char, memory);
    char* tile_a = aligned(memory);
    char* tile_b = tile_a + 8192;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      for (int i = 0; i < 64; ++i) {
        for (int k = 0; k < 64; ++k) {
          const unsigned short bits = emulate::bf16_of_float(a[i][k]);
          std::memcpy(tile_a + swizzled(i, k), &bits, 2);
        }
      }
      for (int k = 0; k < 64; ++k) {
        for (int j = 0; j < N; ++j) {
          const unsigned short bits = emulate::bf16_of_float(b[k][j]);
          std::memcpy(tile_b + j / 64 * 8192 + swizzled(k, j % 64), &bits, 2);
        }
      }
    }
    __syncthreads();
    float d[N / 2];
    for (int slice = 0; slice < 4; ++slice) {
      const unsigned address = shared_address(tile_a) + static_cast<unsigned>(slice) * 32;
      const unsigned address_b = shared_address(tile_b) + static_cast<unsigned>(slice) * 16 * 128;
      multiply_group(d, matrix_descriptor(address, 0, 1024), matrix_descriptor(address_b, 8192, 1024), slice > 0,
                     Bf16{});
    }
    commit_products();
    wait_for_products<0>();
    for (int i = 0; i < N / 2; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
      found[row][i / 4 * 8 + thread % 4 * 2 + i % 2] = d[i];
    }
  });
  bool right = true;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < N; ++j) {
      float sum = 0;
      for (int k = 0; k < 64; ++k) sum += a[i][k] * b[k][j];
      right &= sum == found[i][j];
    }
  }
  expect(right, what);
}

// A box at the lower right corner, of which the rest is zeros, there and back.
void test_boxes(bool eager) {
  constexpr int kRows = 20, kColumns = 72;
  static unsigned short from[kRows][kColumns], to[kRows + 1][kColumns];
  for (int i = 0; i < kRows * kColumns; ++i) from[i / kColumns][i % kColumns] = static_cast<unsigned short>(i + 1);
  std::memset(to, 0, sizeof to);
  emulate::eager_copies = eager;
  emulate::eager_reads = eager;
  const TensorMap source = emulate::encode(from, kRows, kColumns, 2, 16);
  const TensorMap target = emulate::encode(to, kRows, kColumns, 2, 16);
  bool right = true;
  emulate::launch({1, 1, 1}, 32, 4096, [&] {
    DYNAMIC_SHARED(char, memory);
    char* box = aligned(memory);
    auto* barrier = reinterpret_cast<Barrier*>(box + 2048);
    if (threadIdx.x != 0) return;
    initialise_barrier(barrier, 1);
    arrive_expecting(barrier, 2048);
    load_box(box, source, barrier, 64, 8);
    wait_for(barrier, 0);
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 64; ++j) {
        unsigned short bits;
        std::memcpy(&bits, box + swizzled(i, j), 2);
        right &= bits == (i + 8 < kRows && j + 64 < kColumns ? from[i + 8][j + 64] : 0);
      }
    }
    store_box(target, box, 64, 8);
    commit_stores();
    if (!eager) right &= to[8][64] == 0;
    wait_for_stores<0>();
  });
  for (int i = 0; i < kRows + 1; ++i) {
    for (int j = 0; j < kColumns; ++j) right &= to[i][j] == (i >= 8 && i < kRows && j >= 64 ? from[i][j] : 0);
  }
  expect(right, "boxes");
}

void test_phases() {
  emulate::eager_copies = true;
  bool right = true;
  bool arrived[2] = {};
  emulate::launch(
      {2, 1, 1}, 64, 64,
      [&] {
        DYNAMIC_SHARED(char, memory);
        auto* barrier = reinterpret_cast<Barrier*>(memory + 32);
        const unsigned rank = cluster_rank();
        if (threadIdx.x == 0) initialise_barrier(barrier, 2);
        __syncthreads();
        wait_for(barrier, 1);  // that before the first is complete
        meet_in_cluster();
        if (threadIdx.x == 0) arrive(barrier);
        if (threadIdx.x == 32) {
          arrived[rank] = true;
          arrive_at(barrier, 1 - rank);
        }
        wait_for(barrier, 0);
        right &= arrived[1 - rank];
        meet_at(1, 64);
        meet_in_cluster();
      },
      false, 2);
  expect(right, "phases and arrivals from the other block");
}

void test_multicast() {
  static unsigned short from[8][64];
  for (int i = 0; i < 512; ++i) from[i / 64][i % 64] = static_cast<unsigned short>(i);
  const TensorMap map = emulate::encode(from, 8, 64, 2, 8);
  int right = 0;
  for (const bool eager : {false, true}) {
    emulate::eager_copies = eager;
    emulate::launch(
        {2, 1, 1}, 32, 4096,
        [&] {
          DYNAMIC_SHARED(char, memory);
          char* box = aligned(memory);
          auto* barrier = reinterpret_cast<Barrier*>(box + 1024);
          if (threadIdx.x == 0) initialise_barrier(barrier, 1);
          meet_in_cluster();
          if (threadIdx.x == 0) {
            arrive_expecting(barrier, 1024);
            if (cluster_rank() == 1) load_box_everywhere(box, map, barrier, 0, 0, 3);
          }
          wait_for(barrier, 0);
          unsigned short bits;
          std::memcpy(&bits, box + swizzled(7, 63), 2);
          if (threadIdx.x == 0) right += bits == 511;
          meet_in_cluster();
        },
        false, 2);
  }
  expect(right == 4, "a box for both blocks");
}

void test_stored_matrices() {
  alignas(16) static unsigned short plain[16][16], back[16][16];
  for (int i = 0; i < 256; ++i) plain[i / 16][i % 16] = static_cast<unsigned short>(i);
  emulate::launch({1, 1, 1}, 32, 0, [&] {
    const unsigned lane = threadIdx.x;
    unsigned four[4];
    load_matrix_x4(four, &plain[lane % 16][lane / 16 * 8]);
    store_matrix_x4(&back[lane % 16][lane / 16 * 8], four);
  });
  expect(std::memcmp(plain, back, sizeof plain) == 0, "stmatrix is the inverse of ldmatrix");
}

}  // namespace

int main() {
  for (const bool eager : {false, true}) {
    test_product<64>("wgmma n64", eager);
    test_product<192>("wgmma n192", eager);
    test_product<256>("wgmma n256", eager);
    test_boxes(eager);
  }
  test_phases();
  test_multicast();
  test_stored_matrices();
  return failures != 0;
}
