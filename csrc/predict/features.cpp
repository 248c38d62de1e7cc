#include "predict/features.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>

#include "base/processor.hpp"
#include "predict/eight_words.hpp"
#include "predict/logarithm.hpp"
#include "predict/words.hpp"
#include "predict/work.hpp"

namespace cudasched::predict {
namespace {

constexpr std::uint32_t kLeastSize = 2;
constexpr std::uint32_t kSizeLimit = 1U << 28;
constexpr std::size_t kSizes = 6;

// Of the words that are sizes: the greatest distinct ones in falling order, and how many there are in all.
struct Sizes {
  std::array<std::uint32_t, kSizes> greatest{};
  std::uint32_t count = 0;

  void add(std::uint32_t word) noexcept {
    const bool is_size = word - kLeastSize < kSizeLimit - kLeastSize;
    count += is_size ? 1 : 0;
    if (is_size) insert(word);
  }

  void insert(std::uint32_t word) noexcept {
    if (word <= greatest.back() || std::find(greatest.begin(), greatest.end(), word) != greatest.end()) return;
    for (std::size_t i = kSizes - 1; i > 0; --i) {
      greatest[i] = std::max(greatest[i], std::min(word, greatest[i - 1]));
    }
    greatest[0] = std::max(greatest[0], word);
  }
};

// Adds the words from `at`, which is even.
void add_rest(std::span<const std::uint32_t> words, std::size_t at, const Allocations* allocations,
              Sizes& sizes) noexcept {
  for (; at + 1 < words.size(); at += 2) {
    const std::uint32_t low = words[at];
    const std::uint32_t high = words[at + 1];
    if ((low | high) == 0 || is_address(low, high, allocations)) continue;
    sizes.add(low);
    sizes.add(high);
  }
  if (at < words.size()) sizes.add(words[at]);
}

#if defined(__x86_64__)
// One more size, as by Sizes::insert().
__attribute__((target("avx2"))) inline __m256i inserted(__m256i greatest, __m256i word) noexcept {
  if (lanes_of(_mm256_cmpeq_epi32(greatest, word)) != 0) return greatest;
  // Smaller sizes move down by a place.
  const __m256i above =
      _mm256_or_si256(_mm256_permutevar8x32_epi32(greatest, _mm256_setr_epi32(0, 0, 1, 2, 3, 4, 5, 6)),
                      _mm256_setr_epi32(-1, 0, 0, 0, 0, 0, 0, 0));
  return _mm256_max_epu32(greatest, _mm256_min_epu32(above, word));
}

// Eight words at once and 64 at a time, so that few loops have unpredictable ends. Words that are no size are passed
// over, and addresses are searched only where the upper half may be one's. Only words greater than the least of the
// greatest are examined one by one.
__attribute__((target("avx2"))) std::size_t add_eights_avx2(std::span<const std::uint32_t> words,
                                                            const Allocations* allocations, Sizes& sizes) noexcept {
  constexpr std::size_t kAtATime = 64;
  constexpr std::uint64_t kUpperHalves = 0xaaaa'aaaa'aaaa'aaaaULL;
  const UpperHalves halves(allocations);
  const std::size_t whole = words.size() / 8 * 8;
  __m256i greatest = _mm256_setzero_si256();  // the first kSizes count
  for (std::size_t begin = 0; begin < whole; begin += kAtATime) {
    const __m256i least = _mm256_permutevar8x32_epi32(greatest, _mm256_set1_epi32(kSizes - 1));
    std::uint64_t taken = 0;
    std::uint64_t upper = 0;
    std::uint64_t large = 0;
    for (std::size_t at = begin; at < std::min(whole, begin + kAtATime); at += 8) {
      const __m256i eight = load_eight(words.data() + at);
      const std::size_t shift = at - begin;
      taken |= lanes_of(are_between(eight, kLeastSize, kSizeLimit - 1)) << shift;
      upper |= lanes_of(are_between(eight, halves.least, halves.most)) << shift;
      // Below 2^28, so that the signed comparison serves.
      large |= lanes_of(_mm256_cmpgt_epi32(eight, least)) << shift;
    }
    for (upper &= (taken | taken << 1) & kUpperHalves; upper != 0; upper &= upper - 1) {
      const auto lane = static_cast<std::uint32_t>(std::countr_zero(upper));
      if (is_address(words[begin + lane - 1], words[begin + lane], allocations)) {
        taken &= ~(std::uint64_t{3} << (lane - 1));
      }
    }
    sizes.count += static_cast<std::uint32_t>(std::popcount(taken));
    for (taken &= large; taken != 0; taken &= taken - 1) {
      greatest = inserted(greatest, in_all_lanes(words[begin + static_cast<std::uint32_t>(std::countr_zero(taken))]));
    }
  }
  static_assert(kSizes == 6);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(sizes.greatest.data()), _mm256_castsi256_si128(greatest));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(sizes.greatest.data() + 4), _mm256_extracti128_si256(greatest, 1));
  return whole;
}

#endif

std::size_t add_eights_portable(std::span<const std::uint32_t>, const Allocations*, Sizes&) noexcept { return 0; }

#if !defined(__x86_64__)
constexpr auto* add_eights_avx2 = &add_eights_portable;
#endif
const auto add_eights = has_avx2() ? add_eights_avx2 : &add_eights_portable;

Sizes sizes_of(std::span<const std::uint32_t> words, const Allocations* allocations) noexcept {
  Sizes sizes;
  add_rest(words, add_eights(words, allocations, sizes), allocations, sizes);
  return sizes;
}

}  // namespace

std::string features_apart(std::span<const std::string> names, std::size_t count) {
  if (names.empty()) {
    return count == kFeatureCount
               ? std::string()
               : "it takes " + std::to_string(count) + " features where launches have " + std::to_string(kFeatureCount);
  }
  if (std::equal(names.begin(), names.end(), kFeatureNames.begin(), kFeatureNames.end())) return {};
  const auto list = [](const char* verb, const auto& of, const auto& others) {
    constexpr std::size_t kMostNamed = 5;
    std::string told;
    std::size_t found = 0;
    for (const auto& name : of) {
      if (std::find(others.begin(), others.end(), name) != others.end()) continue;
      if (++found <= kMostNamed) told += (told.empty() ? verb : std::string(", ")) + std::string(name);
    }
    return found > kMostNamed ? told + " and " + std::to_string(found - kMostNamed) + " more" : told;
  };
  const std::string lacks = list("it lacks ", kFeatureNames, names);
  const std::string has = list("it has ", names, kFeatureNames);
  if (lacks.empty() && has.empty()) return "its features are in another order";
  return lacks.empty() || has.empty() ? lacks + has : lacks + "; " + has;
}

void features(const Query& query, const Allocations* allocations, float* row) noexcept {
  static constexpr Function kUnknown{};
  const Launch& launch = query.launch;
  const Function& function = query.function != nullptr ? *query.function : kUnknown;
  const NameTraits& traits = function.traits;
  const Residency& residency = query.residency;

  const std::uint64_t blocks = std::max<std::uint64_t>(launch.blocks(), 1);
  const std::uint32_t threads = std::max(launch.threads_per_block(), 1U);
  const auto sm_count = static_cast<std::uint64_t>(std::max(residency.sm_count, 1));
  const auto blocks_per_sm = static_cast<std::uint64_t>(std::max(residency.blocks_per_sm, 1));
  const std::uint64_t resident = sm_count * blocks_per_sm;
  const std::uint64_t whole_waves = (blocks + resident - 1) / resident;
  const std::uint64_t in_tail = blocks - (whole_waves - 1) * resident;
  const float log_blocks = log2_of(blocks);
  const float log_threads = log2_of(threads);
  const float log_waves = log2_of(whole_waves);

  const WorkSizes work = work_sizes(traits.layout, query.words, blocks);
  const float log_all = work.log_m + work.log_n + work.log_k;
  std::array<float, kSizes> logs{};
  std::uint32_t count = 0;
  if (work.is_all) {
    logs = {work.log_m, work.log_n, work.log_k};
    std::sort(logs.begin(), logs.begin() + 3, std::greater<>());
    count = 3;
  } else {
    const Sizes sizes = sizes_of(query.words, allocations);
    for (std::size_t i = 0; i < kSizes; ++i) logs[i] = log2_of(sizes.greatest[i]);
    count = sizes.count;
  }
  const float log_inner = log_all > 0 ? work.log_k : logs[0];

  float* out = row;
  const auto put = [&out](float value) { *out++ = value; };
  put(log_blocks);
  for (const std::uint32_t side : launch.grid) put(log2_of(side));
  put(log_threads);
  put(log2_of(launch.block[0]));
  put(log2_of(launch.block[1]));
  put(log2_of(std::uint64_t{launch.cluster[0]} * launch.cluster[1] * launch.cluster[2]));
  put(log_blocks + log_threads);
  put(log2_of(launch.dynamic_shared_bytes));
  put(log2_of(function.static_shared_bytes));
  put(static_cast<float>(function.registers));
  put(log2_of(function.local_bytes));
  put(log2_of(function.max_threads));
  put(static_cast<float>(blocks_per_sm));
  put(static_cast<float>(blocks_per_sm * threads) / static_cast<float>(std::max(residency.max_threads_per_sm, 1)));
  put(log_blocks - log2_of(resident));
  put(log_waves);
  put(static_cast<float>(in_tail) / static_cast<float>(resident));
  put(static_cast<float>(sm_count));
  const float log_m = log2_of(traits.tile[0]);
  const float log_n = log2_of(traits.tile[1]);
  put(log_m);
  put(log_n);
  put(log2_of(traits.tile[2]));
  put(static_cast<float>(traits.stages));
  put(static_cast<float>(traits.element_bytes));
  put(static_cast<float>(traits.vector_width));
  put(static_cast<float>(traits.family));
  put(log2_of(function.parameter_bytes));
  for (const float log : logs) put(log);
  put(log2_of(std::uint64_t{count} + 1));
  put(logs[0] + logs[1]);
  put(logs[0] + logs[1] + logs[2]);
  put(logs[0] + logs[1] + logs[2] + logs[3]);
  put(log_blocks + log_m + log_n + log_inner - log2_of(sm_count));
  put(log_waves + log_inner);
  put(log_blocks + log_threads + log2_of(traits.vector_width) + log2_of(traits.element_bytes));
  put(logs[0] - log_blocks - log_threads);
  put(std::max(work.log_m, work.log_n));
  put(std::min(work.log_m, work.log_n));
  put(work.log_k);
  put(log_all);
  put(log_all - log2_of(std::min(blocks, sm_count)));
  put(log_all - std::min({work.log_m, work.log_n, work.log_k}));
}

}  // namespace cudasched::predict
