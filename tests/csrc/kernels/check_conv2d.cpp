// Runs one configuration of conv2d.cu, or with HOPPER of conv2d_sm90.cu, on the host and compares it with plain loops
// in double. The configuration comes by macros; arguments: images, height, width, channels, filters, rows, columns,
// stride, padding, dilation, whether there is a bias. Prints the largest error, and how many loads of matrices met bank
// conflicts. tests/python/test_kernels_attention.py builds and runs it.
#include "emulate.hpp"

#define EMULATED_MMA "emulate_mma.hpp"
#include <random>

#ifdef HOPPER
#define EMULATED_HOPPER "emulate_hopper.hpp"
#define EMULATED_HOPPER_PRODUCTS "emulate_hopper_products.hpp"
#include "conv2d_sm90.cu"
#else
#include "conv2d.cu"
#endif

namespace {

#ifdef HOPPER
constexpr auto kKernel = conv2d_sm90;
constexpr std::size_t kAligned = 1024;
#else
constexpr auto kKernel = conv2d;
constexpr std::size_t kAligned = 0;
#endif

// With NaN behind it, so that what is read beyond the end shows.
std::vector<Element> elements(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<Element> made(count + 64, 0xffff);
  for (std::size_t i = 0; i < count; ++i) from_float(normal(random), made[i]);
  return made;
}

}  // namespace

int main(int, char** arguments) {
  const auto argument = [&](int i) { return std::atoi(arguments[i]); };
  Convolution of{};
  of.images = argument(1), of.height = argument(2), of.width = argument(3), of.channels = argument(4);
  of.filters = argument(5), of.rows = argument(6), of.columns = argument(7);
  of.stride_y = argument(8), of.stride_x = std::max(argument(8) - 1, 1);
  of.padding_y = argument(9), of.padding_x = argument(9) / 2;
  of.dilation_y = argument(10), of.dilation_x = argument(10);
  of.out_height = (of.height + 2 * of.padding_y - of.dilation_y * (of.rows - 1) - 1) / of.stride_y + 1;
  of.out_width = (of.width + 2 * of.padding_x - of.dilation_x * (of.columns - 1) - 1) / of.stride_x + 1;
  const auto x = elements(of.images * of.height * of.width * of.channels, 1);
  const auto w = elements(of.filters * of.rows * of.columns * of.channels, 2);
  const auto bias = elements(of.filters, 3);
  const bool biased = argument(11) != 0;

  std::vector<double> wanted;
  for (int image = 0; image < of.images; ++image)
    for (int p = 0; p < of.out_height; ++p)
      for (int q = 0; q < of.out_width; ++q)
        for (int filter = 0; filter < of.filters; ++filter) {
          double sum = biased ? to_float(bias[filter]) : 0;
          for (int row = 0; row < of.rows; ++row)
            for (int column = 0; column < of.columns; ++column) {
              const int from_y = p * of.stride_y - of.padding_y + row * of.dilation_y;
              const int from_x = q * of.stride_x - of.padding_x + column * of.dilation_x;
              if (from_y < 0 || from_y >= of.height || from_x < 0 || from_x >= of.width) continue;
              for (int channel = 0; channel < of.channels; ++channel)
                sum += double{to_float(x[((image * of.height + from_y) * of.width + from_x) * of.channels + channel])} *
                       to_float(w[((filter * of.rows + row) * of.columns + column) * of.channels + channel]);
            }
          wanted.push_back(sum);
        }

  const int pixels = of.images * of.out_height * of.out_width;
  const unsigned tiles = (pixels + TILE_M - 1) / TILE_M * ((of.filters + TILE_N - 1) / TILE_N);
  std::vector<float> workspace(SPLIT_K > 1 ? SPLIT_K * tiles * TILE_M * TILE_N + tiles : 0, 0.0f);
#if defined(OUT_BY_SHARED) && OUT_BY_SHARED == 0
  const std::size_t shared = kAligned + STAGES * kStageBytes;
#else
  const std::size_t shared = kAligned + std::max(STAGES * kStageBytes, TILE_M * kOutBytes);
#endif
  double worst = 0;
  for (const bool eager : {false, true}) {  // the counters are zero again after a launch
    emulate::eager_copies = eager;
#ifdef HOPPER
    emulate::eager_reads = !eager;
#endif
    std::vector<Element> y(wanted.size() + 8, 0xffff);
    emulate::launch(
        {tiles, 1, SPLIT_K}, kThreads, shared,
        [&] {
          kKernel(y.data(), x.data(), w.data(), biased ? bias.data() : nullptr, workspace.data(), of.images, of.height,
                  of.width, of.channels, of.filters, of.rows, of.columns, of.out_height, of.out_width, of.stride_y,
                  of.stride_x, of.padding_y, of.padding_x, of.dilation_y, of.dilation_x);
        },
        eager);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const double error = std::abs(to_float(y[i]) - wanted[i]) / (std::abs(wanted[i]) + 1);
      worst = error <= 1e30 ? std::max(worst, error) : INFINITY;
    }
    for (std::size_t i = wanted.size(); i < y.size(); ++i) {
      if (y[i] != 0xffff) worst = INFINITY;
    }
  }
  std::printf("%g %ld\n", worst, emulate::bank_conflicts);
}
