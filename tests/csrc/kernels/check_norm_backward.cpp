// Runs one configuration of layernorm_backward.cu on the host and compares it with a float64 reference. The
// configuration comes by macros; tests/python/test_kernels_attention.py builds and runs it. Prints the largest errors
// of dx, and of dweight and dbias.
#include <random>

#include "emulate.hpp"
#include "layernorm_backward.cu"

namespace {

constexpr int kRows = KERNEL_ROWS;

std::vector<Element> elements(std::size_t count, unsigned seed, float offset) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(offset, 1.0f);
  std::vector<Element> made(count);
  for (Element& element : made) from_float(normal(random), element);
  return made;
}

std::vector<Element> unwritten(std::size_t count) {
  std::vector<Element> made(count);
  std::memset(made.data(), 0xff, count * sizeof(Element));  // NaN in all types
  return made;
}

double error_of(const std::vector<Element>& found, const std::vector<double>& wanted) {
  double worst = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const double value = to_float(found[i]);
    if (!(std::abs(value) < 1e30)) return INFINITY;
    worst = std::max(worst, std::abs(value - wanted[i]) / (std::abs(wanted[i]) + 1));
  }
  return worst;
}

}  // namespace

int main(int, char** arguments) {
  const auto blocks = static_cast<unsigned>(std::atoi(arguments[1]));
  const auto x = elements(kRows * COLS, 1, 3.0f);
  const auto dy = elements(kRows * COLS, 2, 0.5f);
  const auto weight = elements(COLS, 3, 1.0f);

  std::vector<double> dx, dweight(COLS), dbias(COLS);
  for (int row = 0; row < kRows; ++row) {
    const auto at = [&](const auto& array, int column) { return double{to_float(array[row * COLS + column])}; };
    double mean = 0, squares = 0, g_sum = 0, gn_sum = 0;
    for (int i = 0; i < COLS; ++i) mean += RMS ? 0 : at(x, i) / COLS;
    for (int i = 0; i < COLS; ++i) squares += (at(x, i) - mean) * (at(x, i) - mean);
    const double scale = 1 / std::sqrt(squares / COLS + 1e-5);
    const auto normal = [&](int i) { return (at(x, i) - mean) * scale; };
    for (int i = 0; i < COLS; ++i) {
      const double g = at(dy, i) * to_float(weight[i]);
      g_sum += RMS ? 0 : g;
      gn_sum += g * normal(i);
      dweight[i] += at(dy, i) * normal(i);
      dbias[i] += at(dy, i);
    }
    for (int i = 0; i < COLS; ++i) {
      dx.push_back(scale * (at(dy, i) * to_float(weight[i]) - g_sum / COLS - normal(i) * gn_sum / COLS));
    }
  }

  const std::size_t kept = KEEP == KEEP_SHARED ? 2 * ROWS_PER_BLOCK * COLS * sizeof(Element) : 0;
  const std::size_t sums = ACCUMULATE == 1 ? ROWS_PER_BLOCK : ROWS_PER_BLOCK > 1 ? 1 : 0;
  const std::size_t shared = (kept + 15) / 16 * 16 + sums * kRowSums * sizeof(float);
  std::vector<float> workspace(blocks * kRowSums + (blocks + GROUP - 1) / GROUP + 1, 0.0f);
  double worst_dx = 0, worst_sums = 0;
  std::vector<Element> first_sums;
  for (const bool backwards : {false, true, false}) {  // the counters are zero again after a launch
    auto found_dx = unwritten(kRows * COLS), found_dweight = unwritten(COLS), found_dbias = unwritten(COLS);
    emulate::launch(
        {blocks, 1, 1}, kThreads, shared,
        [&] {
          layernorm_backward(found_dx.data(), found_dweight.data(),
#if !RMS
                             found_dbias.data(),
#endif
                             dy.data(), x.data(), weight.data(), workspace.data(), kRows, 1e-5f);
        },
        backwards);
    worst_dx = std::max(worst_dx, error_of(found_dx, dx));
    worst_sums = std::max(worst_sums, error_of(found_dweight, dweight));
    if (!RMS) worst_sums = std::max(worst_sums, error_of(found_dbias, dbias));
    if (first_sums.empty()) first_sums = found_dweight;
    if (std::memcmp(first_sums.data(), found_dweight.data(), COLS * sizeof(Element)) != 0) worst_sums = INFINITY;
  }
  std::printf("%g %g\n", worst_dx, worst_sums);
}
