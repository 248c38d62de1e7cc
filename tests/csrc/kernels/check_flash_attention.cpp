// Runs one configuration of flash_attention.cu on the host and compares it with plain loops in double. The
// configuration comes by macros; arguments: batches, heads, heads of q that share one of k and v, queries, keys. Prints
// the largest errors of out and of lse, and how many loads of matrices met bank conflicts.
// tests/python/test_kernels_attention.py builds and runs it.
//
// Arrays are batches x rows x heads x HEAD with gaps behind each row of heads: NaN in those that are read, and looked
// at after the launch in those that are written.
#include "emulate.hpp"

#define EMULATED_MMA "emulate_mma.hpp"
#include <random>

#ifdef HOPPER
#define EMULATED_HOPPER "emulate_hopper.hpp"
#define EMULATED_HOPPER_PRODUCTS "emulate_hopper_products.hpp"
#include "flash_attention_sm90.cu"
#else
#include "flash_attention.cu"
#endif

namespace {

constexpr int kGap = 8;
#ifdef HOPPER
constexpr int kTile = kTileQ;
constexpr std::size_t kSharedBytes = 1024 + kBytesQ + 2 * STAGES * kBytesK;
constexpr auto kKernel = flash_attention_sm90;
#else
constexpr int kTile = TILE_Q;
constexpr std::size_t kRings = 2 * STAGES * kTileBytesK;
constexpr std::size_t kSharedBytes =
    QUERIES_IN == QUERIES_BY_RINGS ? std::max<std::size_t>(kRings, kTileBytesQ) : kRings + kTileBytesQ;
constexpr auto kKernel = flash_attention;
#endif

struct Array {
  Array(int batches, int rows, int heads) : batches(batches), rows(rows), heads(heads), bits(elements()) {
    std::memset(bits.data(), 0xff, bits.size() * sizeof(Element));  // NaN
  }
  std::size_t elements() const { return static_cast<std::size_t>(batches * rows * row_stride()); }
  int row_stride() const { return heads * HEAD + kGap; }
  int batch_stride() const { return rows * row_stride(); }
  Element& at(int batch, int head, int row, int i) {
    return bits[batch * batch_stride() + row * row_stride() + head * HEAD + i];
  }
  void fill(unsigned seed, float scale) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, scale);
    for (int batch = 0; batch < batches; ++batch)
      for (int row = 0; row < rows; ++row)
        for (int i = 0; i < heads * HEAD; ++i) from_float(normal(random), at(batch, 0, row, i));
  }

  int batches, rows, heads;
  std::vector<Element> bits;
};

}  // namespace

int main(int, char** arguments) {
  const auto argument = [&](int i) { return std::atoi(arguments[i]); };
  const int batches = argument(1), heads = argument(2), group = argument(3), queries = argument(4), keys = argument(5);
  Array q(batches, queries, heads), k(batches, keys, heads / group), v(batches, keys, heads / group);
  q.fill(1, 1.5f), k.fill(2, 1.5f), v.fill(3, 1.0f);
  const float scale = 0.11f;

  const unsigned tiles = (queries + kTile - 1) / kTile;
  const dim3 grid = ORDER == 0 ? dim3{tiles, static_cast<unsigned>(heads), static_cast<unsigned>(batches)}
                               : dim3{static_cast<unsigned>(heads), tiles, static_cast<unsigned>(batches)};
  double worst_out = 0, worst_lse = 0;
  for (const bool eager : {false, true}) {
    emulate::eager_copies = eager;
#ifdef HOPPER
    emulate::eager_reads = !eager;
#endif
    Array out(batches, queries, heads);
    std::vector<float> lse(static_cast<std::size_t>(batches * heads * queries), NAN);
    emulate::launch(
        grid, kThreads, kSharedBytes,
        [&] {
          kKernel(out.bits.data(), lse.data(), q.bits.data(), k.bits.data(), v.bits.data(), queries, keys, group, scale,
                  out.batch_stride(), HEAD, out.row_stride(), q.batch_stride(), HEAD, q.row_stride(), k.batch_stride(),
                  HEAD, k.row_stride(), v.batch_stride(), HEAD, v.row_stride());
        },
        eager);
    for (int batch = 0; batch < batches; ++batch) {
      for (int head = 0; head < heads; ++head) {
        for (int row = 0; row < queries; ++row) {
          const int seen = CAUSAL ? std::min(row + 1, keys) : keys;
          std::vector<double> weights;
          double largest = -INFINITY, total = 0;
          for (int key = 0; key < seen; ++key) {
            double score = 0;
            for (int i = 0; i < HEAD; ++i)
              score += double{to_float(q.at(batch, head, row, i))} * to_float(k.at(batch, head / group, key, i));
            weights.push_back(score * scale);
            largest = std::max(largest, weights.back());
          }
          for (double& weight : weights) total += weight = std::exp(weight - largest);
          for (int i = 0; i < HEAD; ++i) {
            double wanted = 0;
            for (int key = 0; key < seen; ++key)
              wanted += weights[key] / total * to_float(v.at(batch, head / group, key, i));
            const double error = std::abs(to_float(out.at(batch, head, row, i)) - wanted);
            worst_out = error <= 1e30 ? std::max(worst_out, error) : INFINITY;
          }
          const double found = lse[(batch * heads + head) * queries + row];
          const double wanted = largest + std::log(total);
          const double error = keys == 0 ? (found == -INFINITY ? 0 : INFINITY) : std::abs(found - wanted);
          worst_lse = error <= 1e30 ? std::max(worst_lse, error) : INFINITY;
        }
      }
      for (int row = 0; row < queries; ++row) {
        for (int i = heads * HEAD; i < out.row_stride(); ++i) {
          if (out.at(batch, 0, row, i) != 0xffff) worst_out = INFINITY;
        }
      }
    }
  }
  std::printf("%g %g %ld\n", worst_out, worst_lse, emulate::bank_conflicts);
}
