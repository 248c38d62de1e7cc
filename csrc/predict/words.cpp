#include "predict/words.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/processor.hpp"
#include "predict/eight_words.hpp"

namespace cudasched::predict {
namespace {

constexpr int kLargeBits = 28;
constexpr std::uint32_t kLargeLimit = 1U << kLargeBits;

constexpr auto kHashKeys = [] {
  std::array<std::uint32_t, kMaxWords> keys{};
  std::uint64_t state = 0x6a09'e667'f3bc'c908ULL;
  for (std::uint32_t& key : keys) {
    state += 0x9e37'79b9'7f4a'7c15ULL;
    std::uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58'476d'1ce4'e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d0'49bb'1331'11ebULL;
    key = static_cast<std::uint32_t>((z ^ (z >> 31)) >> 32);
  }
  return keys;
}();

// The part of a word that counts.
std::uint32_t coarse(std::uint32_t word) noexcept { return std::min(word, kLargeLimit); }

std::uint32_t wide(std::int8_t mask) noexcept { return static_cast<std::uint32_t>(std::int32_t{mask}); }

// NH: of each two neighbours, the words that the mask keeps plus their keys, multiplied. `count` is a multiple of 8.
std::uint64_t sum_products(const std::uint32_t* words, const std::int8_t* mask, const std::uint32_t* keys,
                           std::uint32_t count) noexcept {
  const auto keyed = [&](std::uint32_t at) { return (coarse(words[at]) & wide(mask[at])) + keys[at]; };
  std::uint64_t sum = 0;
  for (std::uint32_t at = 0; at < count; at += 2) sum += std::uint64_t{keyed(at)} * keyed(at + 1);
  return sum;
}

// A bit a word that lies between; `count` is at most 64.
std::uint64_t between(const std::uint32_t* words, std::uint32_t count, std::uint32_t least,
                      std::uint32_t most) noexcept {
  std::uint64_t bits = 0;
  for (std::uint32_t i = 0; i < count; ++i) bits |= std::uint64_t{words[i] - least <= most - least} << i;
  return bits;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline __m256i wide_mask(const std::int8_t* eight) noexcept {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(eight)));
}

__attribute__((target("avx2"))) std::uint64_t sum_products_avx2(const std::uint32_t* words, const std::int8_t* mask,
                                                                const std::uint32_t* keys,
                                                                std::uint32_t count) noexcept {
  __m256i sums = _mm256_setzero_si256();
  for (std::uint32_t at = 0; at < count; at += 8) {
    const __m256i word = _mm256_min_epu32(load_eight(words + at), in_all_lanes(kLargeLimit));
    const __m256i keyed = _mm256_add_epi32(_mm256_and_si256(word, wide_mask(mask + at)), load_eight(keys + at));
    sums = _mm256_add_epi64(sums, _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
  }
  const __m128i sum = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_add_epi64(sum, _mm_unpackhi_epi64(sum, sum))));
}

__attribute__((target("avx2"))) std::uint64_t between_avx2(const std::uint32_t* words, std::uint32_t count,
                                                           std::uint32_t least, std::uint32_t most) noexcept {
  std::uint64_t bits = 0;
  std::uint32_t at = 0;
  for (; at + 8 <= count; at += 8) bits |= lanes_of(are_between(load_eight(words + at), least, most)) << at;
  return at == count ? bits : bits | between(words + at, count - at, least, most) << at;
}

#else
constexpr auto* sum_products_avx2 = &sum_products;
constexpr auto* between_avx2 = &between;
#endif

}  // namespace

Words::Words(std::size_t arena_bytes) noexcept
    : sum_products_(has_avx2() ? sum_products_avx2 : &sum_products),
      between_(has_avx2() ? between_avx2 : &between),
      arena_bytes_(arena_bytes) {
  void* const memory =
      mmap(nullptr, arena_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory != MAP_FAILED) arena_ = static_cast<std::byte*>(memory);
}

Words::~Words() {
  if (arena_ != nullptr) munmap(arena_, arena_bytes_);
}

std::int8_t* Words::take(std::size_t bytes) noexcept {
  constexpr std::size_t kLine = 64;
  bytes = (bytes + kLine - 1) / kLine * kLine;  // and so masks end with whole steps of sum()
  if (arena_ == nullptr || bytes > arena_bytes_ - used_bytes_) return nullptr;
  std::byte* const result = arena_ + used_bytes_;
  used_bytes_ += bytes;
  return reinterpret_cast<std::int8_t*>(result);
}

void Words::meet(const Function& function, std::span<const std::uint32_t> words) noexcept {
  // A second function under one number would be a fault of the caller, and has no mask either.
  if (function.index >= kMaxFunctions || records_[function.index].identity != 0) {
    ++without_room_;
    return;
  }
  Record& record = records_[function.index];
  record.identity = function.identity;
  const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(words.size(), kMaxWords));
  if (count == 0) return;
  record.mask = take(count);
  if (record.mask == nullptr) {
    ++without_room_;
    return;
  }
  record.count = count;
  std::memset(record.mask, -1, count);
  mask_pointers(words.first(count), record.mask);
}

std::uint64_t Words::masked_sum(std::span<const std::uint32_t> words, const std::int8_t* mask) const noexcept {
  const auto count = static_cast<std::uint32_t>(words.size());
  constexpr std::uint32_t kStep = 8;
  const std::uint32_t whole = count - count % kStep;
  std::uint64_t sum = sum_products_(words.data(), mask, kHashKeys.data(), whole);
  if (whole < count) {
    std::array<std::uint32_t, kStep> rest{};
    std::copy(words.begin() + whole, words.end(), rest.begin());
    // The mask has room for whole steps; its bits beyond the last word do not matter.
    sum += sum_products_(rest.data(), mask + whole, kHashKeys.data() + whole, kStep);
  }
  return sum;
}

std::uint64_t Words::sum(const Function& function, std::span<const std::uint32_t> words) const noexcept {
  if (knows(function)) {
    const Record& record = records_[function.index];
    if (record.mask != nullptr) {
      return masked_sum(words.first(std::min<std::size_t>(words.size(), record.count)), record.mask);
    }
  }
  std::array<std::int8_t, kMaxWords> mask;
  const std::span<const std::uint32_t> all = words.first(std::min<std::size_t>(words.size(), kMaxWords));
  std::memset(mask.data(), -1, (all.size() + 7) / 8 * 8);
  mask_pointers(all, mask.data());
  return masked_sum(all, mask.data());
}

std::uint32_t Words::first(const Function& function, std::span<const std::uint32_t> words) const noexcept {
  if (knows(function)) {
    const Record& record = records_[function.index];
    if (record.mask != nullptr) return coarse(words[0]) & wide(record.mask[0]);
  }
  const bool is_out = words.size() > 1 && is_address(words[0], words[1], allocations_);
  return is_out ? 0 : coarse(words[0]);
}

bool Words::mask_pointers(const Function& function, std::span<const std::uint32_t> words) noexcept {
  if (!knows(function)) return false;
  const Record& record = records_[function.index];
  if (record.mask == nullptr) return false;
  return mask_pointers(words.first(std::min<std::size_t>(words.size(), record.count)), record.mask);
}

bool Words::mask_pointers(std::span<const std::uint32_t> words, std::int8_t* mask) const noexcept {
  const auto count = static_cast<std::uint32_t>(words.size());
  const UpperHalves halves(allocations_);
  bool changed = false;
  for (std::uint32_t begin = 0; begin < count; begin += 64) {
    constexpr std::uint64_t kOddPlaces = 0xaaaa'aaaa'aaaa'aaaaULL;
    std::uint64_t upper =
        between_(words.data() + begin, std::min<std::uint32_t>(64, count - begin), halves.least, halves.most) &
        kOddPlaces;
    for (; upper != 0; upper &= upper - 1) {
      const std::uint32_t at = begin + static_cast<std::uint32_t>(std::countr_zero(upper)) - 1;
      if ((words[at] | words[at + 1]) == 0 || (mask[at] | mask[at + 1]) == 0) continue;
      if (!is_address(words[at], words[at + 1], allocations_)) continue;
      mask[at] = mask[at + 1] = 0;
      changed = true;
    }
  }
  return changed;
}

}  // namespace cudasched::predict
