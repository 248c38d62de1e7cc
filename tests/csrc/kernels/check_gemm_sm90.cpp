// Runs one configuration of gemm_sm90.cu on the host and compares it with a float64 reference: blocks and warps
// forwards and backwards, loads as late and products as early as they may be, and the other way round. SIZE_M, SIZE_N
// and SIZE_K are the shape, BLOCKS the grid. Prints the largest |found - wanted| / (|wanted| + 1), "inf" where C or
// what is around it is not as it should be, and how many accesses to matrices met bank conflicts.
#include "emulate.hpp"

#define EMULATED_MMA "emulate_mma.hpp"
#define EMULATED_HOPPER "emulate_hopper.hpp"
#define __cluster_dims__(...)
#include <random>

#include "gemm_sm90.cu"

namespace {

constexpr int m = SIZE_M, n = SIZE_N, k = SIZE_K;
constexpr std::size_t kGuard = 64;

double check(bool backwards, bool eager_copies) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<Element> a(m * k), b(k * n), c(m * n + 2 * kGuard);
  for (Element& element : a) from_float(normal(random), element);
  for (Element& element : b) from_float(normal(random), element);
  std::memset(c.data(), 0xff, c.size() * sizeof(Element));
  emulate::eager_copies = eager_copies;
  emulate::eager_reads = !eager_copies;
  const TensorMap map_a = emulate::encode(a.data(), m, k, 2, TILE_M);
  const TensorMap map_b = emulate::encode(b.data(), k, n, 2, TILE_K);
  const TensorMap map_c = emulate::encode(c.data() + kGuard, m, n, 2, 64);
  const std::size_t shared = 1024 + STAGES * (kStageBytes + 16) + (STORE_BOX ? TILE_M * TILE_N * sizeof(Element) : 0);
  emulate::launch(
      {BLOCKS, 1, 1}, kThreads, shared,
      [&] { gemm_sm90(c.data() + kGuard, a.data(), b.data(), map_a, map_b, map_c, m, n, k); }, backwards, CLUSTER);
  for (std::size_t i = 0; i < kGuard; ++i) {
    if (c[i] != 0xffff || c[kGuard + m * n + i] != 0xffff) return INFINITY;
  }
  double worst = 0;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double wanted = 0;
      for (int l = 0; l < k; ++l) wanted += static_cast<double>(to_float(a[i * k + l])) * to_float(b[l * n + j]);
      const double error = std::abs(to_float(c[kGuard + i * n + j]) - wanted) / (std::abs(wanted) + 1);
      if (!(error < 1e30)) return INFINITY;
      worst = std::max(worst, error);
    }
  }
  return worst;
}

}  // namespace

int main() {
  double worst = 0;
  for (const bool backwards : {false, true}) {
    for (const bool eager : {false, true}) worst = std::max(worst, check(backwards, eager));
  }
  std::printf("%g %ld\n", worst, emulate::bank_conflicts);
}
