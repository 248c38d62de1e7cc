#include "predict/work.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "base/hash.hpp"
#include "predict/logarithm.hpp"

namespace cudasched::predict {
namespace {

// Words whose product is a size; up to the first that is kNone.
constexpr std::uint16_t kNone = 0xffff;
struct Places {
  std::array<std::uint16_t, 4> words{kNone, kNone, kNone, kNone};

  constexpr Places() = default;
  template <typename... Word>
  constexpr explicit Places(Word... word) : words{kNone, kNone, kNone, kNone} {
    std::size_t at = 0;
    ((words[at++] = static_cast<std::uint16_t>(word)), ...);
  }
};

// Tensors' lists of PyTorch: addresses of `depth` lists, then the number of elements of each tensor (8 bytes), then
// `gap` bytes a tensor, then, a byte a block, which tensor the block works on.
struct TensorList {
  std::uint16_t depth = 0;
  std::uint16_t tensors = 0;  // the room for tensors; 0: no such list
  std::uint16_t gap = 0;
};

// The use of the sizes; see work_of().
enum class Kind : std::uint8_t { kUnknown, kProduct, kConvolution, kReads, kReadsAndWrites };

struct Layout {
  std::string_view name;  // part of the kernel's
  std::size_t least_words = 0;
  std::size_t most_words = 0;
  Places m;
  Places n;
  Places k;
  bool has_tensor_maps = false;
  TensorList list;
  std::uint16_t reduction = 0;  // word at which the configuration of a PyTorch reduction begins; 0: none
  bool is_all = false;          // the block's other words are left over, or follow from these
  Kind kind = Kind::kUnknown;
};

constexpr Layout matrices(std::string_view name, std::size_t words, int at, Kind kind = Kind::kProduct) {
  return {name, words, words, Places(at), Places(at + 1), Places(at + 2), false, {}, 0, false, kind};
}

// Batch, depth, height, width and channels of the input, then depth, height, width and channels of the output, then
// the filter's extents.
constexpr Layout convolution(std::string_view name, std::size_t least, std::size_t most, int at,
                             Kind kind = Kind::kConvolution) {
  return {name,
          least,
          most,
          Places(at, at + 5, at + 6, at + 7),
          Places(at + 8),
          Places(at + 4, at + 9, at + 10, at + 11),
          false,
          {},
          0,
          false,
          kind};
}

// The configuration begins with the bytes of an element, the inputs of an output, and the outputs.
constexpr Layout reduction(std::size_t words, int at) {
  return {"native::reduce_kernel<",       words, words,       Places(at + 2), {}, Places(at + 1), false, {},
          static_cast<std::uint16_t>(at), false, Kind::kReads};
}

constexpr Layout rows(std::string_view name, std::size_t words, Places rows, Places columns) {
  return {name, words, words, rows, {}, columns, false, {}};
}

// As rows(), and nothing else in the block counts.
constexpr Layout only_rows(std::string_view name, std::size_t words, Places rows, Places columns, Places depth = {},
                           Kind kind = Kind::kReadsAndWrites) {
  return {name, words, words, rows, depth, columns, false, {}, 0, true, kind};
}

constexpr Layout tensors(std::string_view name, TensorList list) { return {name, 780, 900, {}, {}, {}, false, list}; }

// Of two that fit a name the first counts, but entries of one name go by the block's length.
constexpr Layout kLayouts[] = {
    {"", 1, 0, {}, {}, {}, false, {}},
    // A kernel that adds up the parts of a split product or convolution has its sizes, and little of its work.
    convolution("execute_split_k_kernel", 600, 1000, 26, Kind::kUnknown),
    convolution("execute_split_k_kernel", 200, 380, 14, Kind::kUnknown),
    matrices("execute_split_k_kernel", 588, 16, Kind::kUnknown),
    matrices("execute_split_k_kernel", 184, 39, Kind::kUnknown),
    matrices("cutlass::kernel2<", 90, 0),
    matrices("sm80_xmma_gemm", 184, 39),
    matrices("sm90_xmma_gemm", 588, 16),
    matrices("sgemm_largek", 24, 6),
    matrices("gemmsn_", 38, 23),
    {"nvjet_sm90", 430, 430, {}, {}, {}, true, {}, 0, false, Kind::kProduct},
    rows("splitkreduce_kernel", 56, Places(2, 3), Places(10)),
    convolution("sm90_xmma_fprop", 600, 1000, 26),
    convolution("sm90_xmma_dgrad", 600, 1000, 26),
    convolution("sm90_xmma_wgrad", 600, 1000, 26),
    convolution("sm80_xmma_fprop", 200, 380, 14),
    convolution("sm80_xmma_dgrad", 200, 380, 14),
    convolution("sm80_xmma_wgrad", 200, 380, 14),
    reduction(260, 1),
    reduction(262, 2),
    reduction(264, 4),
    reduction(266, 6),
    only_rows("scan_innermost_dim<", 8, Places(4), Places(5)),
    only_rows("scan_innermost_dim<", 9, Places(4), Places(5)),
    only_rows("scan_innermost_dim_with_indices<", 11, Places(6), Places(7)),
    only_rows("scan_innermost_dim_with_indices<", 12, Places(6), Places(7)),
    only_rows("scan_outer_dim<", 8, Places(4, 5), Places(6)),
    only_rows("scan_outer_dim<", 9, Places(4, 5), Places(6)),
    only_rows("cunn_spatialsoftmaxforward<", 7, Places(4), Places(5), Places(6)),
    only_rows("cunn_spatialsoftmaxbackward<", 9, Places(6), Places(7), Places(8)),
    only_rows("upsample_bicubic2d_", 40, Places(30, 32), Places(6, 8), {},
              Kind::kUnknown),  // a thread an output pixel, for all images
    only_rows("upsample_bilinear2d_", 40, Places(30, 32), Places(6, 8), {}, Kind::kUnknown),
    only_rows("batch_norm_collect_statistics_kernel<", 18, Places(3), Places(2, 4), {}, Kind::kReads),
    tensors("::tensorlistmetadata<1>", {1, 110, 0}),
    tensors("::tensorlistmetadata<2>", {2, 64, 0}),
    tensors("::tensorlistmetadata<3>", {3, 48, 0}),
    tensors("::tensorlistmetadata<4>", {4, 36, 0}),
    tensors("::tensorlistmetadata<5>", {5, 30, 0}),
    tensors("::fusedoptimizertensorlistmetadata<1>", {1, 110, 8}),
    tensors("::fusedoptimizertensorlistmetadata<2>", {2, 64, 8}),
    tensors("::fusedoptimizertensorlistmetadata<3>", {3, 48, 8}),
    tensors("::fusedoptimizertensorlistmetadata<4>", {4, 36, 8}),
    tensors("::fusedoptimizertensorlistmetadata<5>", {5, 30, 8}),
    tensors("::tensorlistscalarlistmetadata<float, 1>", {1, 96, 4}),
    tensors("::tensorlistscalarlistmetadata<float, 2>", {2, 64, 4}),
    tensors("::tensorlistscalarlistmetadata<float, 3>", {3, 48, 4}),
    tensors("::tensorlistscalarlistmetadata<float, 4>", {4, 36, 4}),
};

// Of a word that is no size nothing is believed.
constexpr std::uint32_t kMostSize = 1U << 30;

float log_of_size(std::uint32_t size) noexcept { return size < kMostSize ? log2_of(size) : 0.0F; }

float log_of_product(const Places& places, std::span<const std::uint32_t> words) noexcept {
  float sum = 0;
  for (const std::uint16_t place : places.words) {
    if (place == kNone) break;
    sum += log_of_size(words[place]);
  }
  return sum;
}

double product_of(const Places& places, std::span<const std::uint32_t> words) noexcept {
  if (places.words[0] == kNone) return 0;
  double product = 1;
  for (const std::uint16_t place : places.words) {
    if (place == kNone) break;
    product *= words[place];
  }
  return product;
}

// Three maps of cuBLAS, for the two factors and the result, each with its two extents less one.
constexpr std::size_t kFirstMap = 52;
constexpr std::size_t kSecondMap = 68;
constexpr std::size_t kResultMap = 104;

WorkSizes of_tensor_maps(std::span<const std::uint32_t> words) noexcept {
  const auto log_of_extent = [&](std::size_t place) { return log_of_size(words[place] + 1); };
  WorkSizes sizes{log_of_extent(kResultMap), log_of_extent(kResultMap + 1), 0, true};
  // (m k) (k n) / (m n) is k squared, whichever way the factors lie.
  const float factors = log_of_extent(kFirstMap) + log_of_extent(kFirstMap + 1) + log_of_extent(kSecondMap) +
                        log_of_extent(kSecondMap + 1);
  sizes.log_k = std::max(0.0F, 0.5F * (factors - sizes.log_m - sizes.log_n));
  return sizes;
}

// The number of elements of each tensor that the launch works on, 8 bytes each; empty where the list is inconsistent.
// Entries beyond the last block's tensor are left over from earlier launches.
std::span<const std::uint32_t> elements_of(const TensorList& list, std::span<const std::uint32_t> words,
                                           std::uint64_t blocks) noexcept {
  const std::size_t first = std::size_t{2} * list.depth * list.tensors;
  const std::size_t map = 4 * (first + std::size_t{2} * list.tensors) + std::size_t{list.gap} * list.tensors;
  constexpr std::uint64_t kMostBlocks = 320;
  if (blocks == 0 || blocks > kMostBlocks) return {};
  const std::size_t at = map + static_cast<std::size_t>(blocks) - 1;
  const std::size_t used = (words[at / 4] >> (8 * (at % 4)) & 0xff) + 1;
  if (used > list.tensors) return {};
  return words.subspan(first, 2 * used);
}

WorkSizes of_tensor_list(std::span<const std::uint32_t> elements) noexcept {
  if (elements.empty()) return {};
  std::uint64_t sum = 0;
  std::uint32_t greatest = 0;
  for (std::size_t i = 0; i < elements.size(); i += 2) {
    sum += elements[i];
    greatest = std::max(greatest, elements[i]);
  }
  return {log2_of(sum), 0, log_of_size(greatest), true};
}

constexpr std::uint64_t kKeySeed = 0x776f'726bULL;

std::uint64_t key_of(std::span<const std::uint32_t> words) noexcept {
  std::uint64_t hash = mix(kKeySeed, words.size());
  for (const std::uint32_t word : words) hash = mix(hash, word);
  return hash;
}

// ReduceConfig of PyTorch: 16 words, of which one is a truth value of a byte. Then the offset calculator of the input:
// the number of dimensions, a size with two numbers for its division each, and from a fixed place on a stride each.
std::uint64_t key_of_reduction(std::size_t begin, std::span<const std::uint32_t> words) noexcept {
  constexpr std::size_t kConfiguration = 16;
  constexpr std::size_t kTruth = 14;
  constexpr std::size_t kMostDimensions = 25;
  const std::size_t dimensions = words[begin + kConfiguration];
  const std::size_t sizes = begin + kConfiguration + 1;
  const std::size_t strides = sizes + 3 * kMostDimensions;
  if (dimensions > kMostDimensions || strides + dimensions > words.size()) return 0;
  std::uint64_t hash = key_of(words.subspan(begin, kTruth));
  hash = mix(hash, words[begin + kTruth] & 0xff);
  hash = mix(hash, words[begin + kTruth + 1]);
  for (std::size_t i = 0; i < dimensions; ++i) {
    hash = mix(hash, std::uint64_t{words[sizes + 3 * i]} << 32 | words[strides + i]);
  }
  return hash;
}

// Which of the layouts of one name the block has; null: none.
const Layout* layout_at(std::uint8_t layout, std::size_t words) noexcept {
  if (layout == 0 || layout >= std::size(kLayouts)) return nullptr;
  for (std::size_t i = layout; i < std::size(kLayouts) && kLayouts[i].name == kLayouts[layout].name; ++i) {
    if (words >= kLayouts[i].least_words && words <= kLayouts[i].most_words) return &kLayouts[i];
  }
  return nullptr;
}

}  // namespace

std::uint8_t layout_of(std::string_view name) noexcept {
  for (std::size_t i = 1; i < std::size(kLayouts); ++i) {
    if (name.find(kLayouts[i].name) != std::string_view::npos) return static_cast<std::uint8_t>(i);
  }
  return 0;
}

WorkSizes work_sizes(std::uint8_t layout, std::span<const std::uint32_t> words, std::uint64_t blocks) noexcept {
  const Layout* const found = layout_at(layout, words.size());
  if (found == nullptr) return {};
  if (found->has_tensor_maps) return of_tensor_maps(words);
  if (found->list.tensors != 0) return of_tensor_list(elements_of(found->list, words, blocks));
  return {log_of_product(found->m, words), log_of_product(found->n, words), log_of_product(found->k, words),
          found->n.words[0] != kNone || found->reduction != 0 || found->is_all};
}

Work work_of(std::uint8_t layout, std::span<const std::uint32_t> words, std::uint64_t blocks,
             std::uint32_t element_bytes) noexcept {
  const Layout* const found = layout_at(layout, words.size());
  if (found == nullptr) return {};
  const double element = element_bytes;
  if (found->list.tensors != 0) {
    const std::span<const std::uint32_t> elements = elements_of(found->list, words, blocks);
    double sum = 0;
    for (std::size_t i = 0; i < elements.size(); i += 2) sum += elements[i];
    // A list's last tensor may be another launch's in part.
    constexpr double kElementsOfABlock = 65'536;
    return {std::min(sum, static_cast<double>(blocks) * kElementsOfABlock) * found->list.depth * element, 0};
  }
  double m = product_of(found->m, words);
  double n = product_of(found->n, words);
  double k = product_of(found->k, words);
  if (found->has_tensor_maps) {
    const auto extent = [&](std::size_t place) { return 1.0 + words[place]; };
    m = extent(kResultMap);
    n = extent(kResultMap + 1);
    k = std::sqrt(extent(kFirstMap) * extent(kFirstMap + 1) * extent(kSecondMap) * extent(kSecondMap + 1) / (m * n));
  }
  // Of sizes that no program launches nothing is believed.
  constexpr double kMostWork = 1e18;
  if (!(m > 0 && k > 0 && m * std::max(n, 1.0) * k < kMostWork)) return {};
  switch (found->kind) {
    case Kind::kProduct:
      return {(m * k + k * n + m * n) * element, 2 * m * n * k};
    case Kind::kConvolution:
      return {0, 2 * m * n * k};
    case Kind::kReads:
      return {m * k * element, 0};
    case Kind::kReadsAndWrites:
      return {2 * m * std::max(n, 1.0) * k * element, 0};
    default:
      return {};
  }
}

std::uint64_t work_key(std::uint8_t layout, std::span<const std::uint32_t> words, std::uint64_t blocks) noexcept {
  const Layout* const found = layout_at(layout, words.size());
  if (found == nullptr) return 0;
  if (found->reduction != 0) return key_of_reduction(found->reduction, words);
  if (found->list.tensors == 0) return 0;
  const std::span<const std::uint32_t> elements = elements_of(found->list, words, blocks);
  return elements.empty() ? 0 : key_of(elements);
}

}  // namespace cudasched::predict
