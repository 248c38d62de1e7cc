// Runs one configuration of one kernel of csrc/kernels on the host and compares it with a float64 reference. The
// configuration comes by macros, the kernel by KERNEL_SOURCE; tests/python/test_kernels.py builds and runs it.
#include "emulate.hpp"

#define EMULATED_MMA "emulate_mma.hpp"
#include KERNEL_SOURCE

#include <random>

namespace {

std::vector<Element> elements(std::size_t count, unsigned seed, float offset) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(offset, 1.0f);
  std::vector<Element> made(count);
  for (Element& element : made) from_float(normal(random), element);
  return made;
}

// The largest |found - wanted| / (|wanted| + 1); infinite where something is NaN or was not written.
double error_of(const std::vector<Element>& found, const std::vector<double>& wanted) {
  double worst = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const double value = to_float(found[i]);
    if (!(std::abs(value) < 1e30)) return INFINITY;
    worst = std::max(worst, std::abs(value - wanted[i]) / (std::abs(wanted[i]) + 1));
  }
  return worst;
}

const double kUnwritten = NAN;

std::vector<Element> unwritten(std::size_t count) {
  std::vector<Element> made(count);
  for (Element& element : made) {
    element = Element{};
    std::memset(&element, 0xff, sizeof element);  // NaN in all types
  }
  return made;
}

#if defined(KERNEL_ROWS)
double check(unsigned blocks, bool backwards) {
  constexpr int kRows = KERNEL_ROWS;
  const auto x = elements(kRows * COLS, 1, 3.0f);
  const auto weight = elements(COLS, 2, 1.0f);
  const auto bias = elements(COLS, 3, 0.0f);
  auto y = unwritten(kRows * COLS);
  const std::size_t shared = KEEP == KEEP_SHARED ? std::size_t{ROWS_PER_BLOCK} * COLS * sizeof(Element) : 0;
  std::vector<double> wanted;
  for (int row = 0; row < kRows; ++row) {
    double sum = 0, squares = 0, maximum = -INFINITY, exponentials = 0;
    const auto at = [&](int column) { return static_cast<double>(to_float(x[row * COLS + column])); };
    for (int i = 0; i < COLS; ++i) sum += at(i), maximum = std::max(maximum, at(i));
#if defined(RMS) && RMS
    const double mean = 0 * sum;
#else
    const double mean = sum / COLS;
#endif
    for (int i = 0; i < COLS; ++i)
      squares += (at(i) - mean) * (at(i) - mean), exponentials += std::exp(at(i) - maximum);
    for (int i = 0; i < COLS; ++i) {
#if defined(ONLINE)
      wanted.push_back(std::exp(at(i) - maximum) / exponentials);
#elif RMS
      wanted.push_back(at(i) / std::sqrt(squares / COLS + 1e-5) * to_float(weight[i]));
#else
      wanted.push_back((at(i) - mean) / std::sqrt(squares / COLS + 1e-5) * to_float(weight[i]) + to_float(bias[i]));
#endif
    }
  }
#if defined(ONLINE)
  const auto kernel = [&] { softmax(y.data(), x.data(), kRows); };
#else
  const auto kernel = [&] { layernorm(y.data(), x.data(), weight.data(), bias.data(), kRows, 1e-5f); };
#endif
  emulate::launch({blocks, 1, 1}, kThreads, shared, kernel, backwards);
  return error_of(y, wanted);
}
#else
double check(unsigned, bool backwards) {
  constexpr int m = SIZE_M, n = SIZE_N, k = SIZE_K;
  const auto a = elements(m * k, 1, 0.0f);
  const auto b = elements(k * n, 2, 0.0f);
  auto c = unwritten(m * n);
  const unsigned tiles = ((m + TILE_M - 1) / TILE_M) * ((n + TILE_N - 1) / TILE_N);
  std::vector<float> workspace(SPLIT_K * m * n + tiles, 0.0f);
  std::vector<double> wanted;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int l = 0; l < k; ++l) sum += static_cast<double>(a[i * k + l]) * b[l * n + j];
      wanted.push_back(sum);
    }
  }
  emulate::eager_copies = backwards;
  double worst = 0;
  for (int repeat = 0; repeat < 2; ++repeat) {  // the counters are zero again after a launch
    c = unwritten(m * n);
    emulate::launch(
        {tiles, 1, SPLIT_K}, kThreads, sizeof(float) * BUFFERS * (kFloatsA + kFloatsB),
        [&] { gemm(c.data(), a.data(), b.data(), workspace.data(), m, n, k); }, backwards);
    worst = std::max(worst, error_of(c, wanted));
  }
  return worst;
}
#endif

}  // namespace

int main(int, char** arguments) {
  const auto blocks = static_cast<unsigned>(std::atoi(arguments[1]));
  std::printf("%g\n", std::max(check(blocks, false), check(blocks, true)));
}
