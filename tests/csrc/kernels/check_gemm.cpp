// Runs one configuration of a matrix product on the host and compares it with a float64 reference, blocks forwards and
// backwards, copies as early and as late as they may be done. KERNEL_SOURCE names the source, SIZE_M, SIZE_N and SIZE_K
// the shape. Prints the largest |found - wanted| / (|wanted| + 1), "inf" where C or what is around it is not as it
// should be, and how many loads of matrices met bank conflicts.
#include "emulate.hpp"

#define EMULATED_MMA "emulate_mma.hpp"
#include KERNEL_SOURCE

#include <random>

namespace {

double value_of(float value) { return value; }
double value_of(int value) { return value; }
double value_of(signed char value) { return value; }
double value_of(unsigned short bits) { return to_float(bits); }
double operand(float value) {  // tf32: as the kernel rounds it
  return emulate::float_of_tf32(round_to_tf32(__float_as_uint(value)));
}
double operand(signed char value) { return value; }
double operand(unsigned short bits) { return to_float(bits); }

void draw(std::mt19937& random, signed char& element) {
  element = static_cast<signed char>(std::uniform_int_distribution<int>(-128, 127)(random));
}
template <typename T>
void draw(std::mt19937& random, T& element) {
  from_float(std::normal_distribution<float>(0.0f, 1.0f)(random), element);
}

std::vector<Element> elements(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Element> made(count);
  for (Element& element : made) draw(random, element);
  return made;
}

constexpr int m = SIZE_M, n = SIZE_N, k = SIZE_K;
constexpr std::size_t kGuard = 64;

double check(bool backwards, bool eager) {
  const auto a = elements(m * k, 1);
  const auto b = elements(k * n, 2);
  const unsigned tiles = ((m + TILE_M - 1) / TILE_M) * ((n + TILE_N - 1) / TILE_N);
  std::vector<Total> workspace(SPLIT_K * m * n + tiles, Total{});
  emulate::eager_copies = eager;
  double worst = 0;
  for (int repeat = 0; repeat < 2; ++repeat) {  // the counters are zero again after a launch
    std::vector<Output> c(m * n + 2 * kGuard);
    std::memset(c.data(), 0xa5, c.size() * sizeof(Output));
    const auto untouched = c;
    emulate::launch(
        {tiles, 1, SPLIT_K}, kThreads, STAGES * kStageBytes,
        [&] { gemm_mma(c.data() + kGuard, a.data(), b.data(), workspace.data(), m, n, k); }, backwards);
    for (std::size_t i = 0; i < kGuard; ++i) {
      if (std::memcmp(&c[i], &untouched[i], sizeof(Output)) != 0) return INFINITY;
      if (std::memcmp(&c[kGuard + m * n + i], &untouched[i], sizeof(Output)) != 0) return INFINITY;
    }
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        double wanted = 0;
        for (int l = 0; l < k; ++l) wanted += operand(a[i * k + l]) * operand(b[l * n + j]);
        const double found = value_of(c[kGuard + i * n + j]);
        const double error = std::abs(found - wanted) / (std::abs(wanted) + 1);
        if (!(error < 1e30)) return INFINITY;
        worst = std::max(worst, error);
      }
    }
  }
  return worst;
}

}  // namespace

int main() {
  const double error = std::max(check(false, false), check(true, true));
  std::printf("%g %ld\n", error, emulate::bank_conflicts);
}
