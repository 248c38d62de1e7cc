#include "predict/words.hpp"

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "base/hash.hpp"

namespace cudasched::predict {
namespace {

// Below it a number may be a size or a count; a Philox offset may be too, hence the rules for small ones.
constexpr std::uint32_t kSizeLimit = 1U << 20;
constexpr int kLargeBits = 28;
constexpr std::uint32_t kLargeLimit = 1U << kLargeBits;
// The upper halves of is_host_address(), and of what looks like a pointer.
constexpr std::uint32_t kLeastUpperHalf = 0x5500;
constexpr std::uint32_t kMostUpperHalf = 0x7fff;
constexpr std::uint32_t kFarApart = 16;  // greatest over least
constexpr std::uint32_t kFarOut = 1024;  // below it all may be as short as a launch can be

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

// What counts of a word.
std::uint32_t coarse(std::uint32_t word) noexcept { return std::min(word, kLargeLimit); }

std::uint32_t wide(std::int8_t mask) noexcept { return static_cast<std::uint32_t>(std::int32_t{mask}); }

__attribute__((target("avx2"))) inline __m256i wide_mask(const std::int8_t* eight) noexcept {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(eight)));
}

// NH: of each two neighbours, the words that the mask keeps plus their keys, multiplied. `count` is a multiple of 8.
std::uint64_t sum_products_sse2(const std::uint32_t* words, const std::int8_t* mask, const std::uint32_t* keys,
                                std::uint32_t count) noexcept {
  const auto load = [](const std::uint32_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
  __m128i sums[2] = {_mm_setzero_si128(), _mm_setzero_si128()};
  for (std::uint32_t at = 0; at < count; at += 8) {
    for (std::uint32_t half = 0; half < 2; ++half) {
      const std::uint32_t here = at + 4 * half;
      const __m128i word = load(words + here);
      const __m128i is_small = _mm_cmpeq_epi32(_mm_srli_epi32(word, kLargeBits), _mm_setzero_si128());
      const __m128i least =
          _mm_or_si128(_mm_and_si128(is_small, word), _mm_andnot_si128(is_small, _mm_set1_epi32(kLargeLimit)));
      std::int32_t four = 0;
      std::memcpy(&four, mask + here, sizeof four);
      const __m128i twice = _mm_unpacklo_epi8(_mm_cvtsi32_si128(four), _mm_cvtsi32_si128(four));
      const __m128i kept = _mm_and_si128(least, _mm_unpacklo_epi16(twice, twice));
      const __m128i keyed = _mm_add_epi32(kept, load(keys + here));
      sums[half] = _mm_add_epi64(sums[half], _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32)));
    }
  }
  const __m128i sum = _mm_add_epi64(sums[0], sums[1]);
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_add_epi64(sum, _mm_unpackhi_epi64(sum, sum))));
}

__attribute__((target("avx2"))) std::uint64_t sum_products_avx2(const std::uint32_t* words, const std::int8_t* mask,
                                                                const std::uint32_t* keys,
                                                                std::uint32_t count) noexcept {
  __m256i sums = _mm256_setzero_si256();
  for (std::uint32_t at = 0; at < count; at += 8) {
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + at));
    const __m256i kept = _mm256_and_si256(_mm256_min_epu32(word, _mm256_set1_epi32(kLargeLimit)), wide_mask(mask + at));
    const __m256i keyed = _mm256_add_epi32(kept, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + at)));
    sums = _mm256_add_epi64(sums, _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
  }
  const __m128i sum = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_add_epi64(sum, _mm_unpackhi_epi64(sum, sum))));
}

auto fastest() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") ? &sum_products_avx2 : &sum_products_sse2;
}

void insert(WordSet& set, std::uint32_t word) noexcept { set[word / 64] |= std::uint64_t{1} << (word % 64); }

bool has(const WordSet& set, std::uint32_t word) noexcept { return (set[word / 64] >> (word % 64) & 1) != 0; }

template <typename Visit>
void for_each(const WordSet& set, Visit&& visit) {
  for (std::uint32_t part = 0; part < set.size(); ++part) {
    for (std::uint64_t bits = set[part]; bits != 0; bits &= bits - 1) {
      visit(part * 64 + static_cast<std::uint32_t>(std::countr_zero(bits)));
    }
  }
}

// How many words count and are not the same.
std::uint32_t differing(const std::uint32_t* a, const std::uint32_t* b, const std::int8_t* mask,
                        std::uint32_t count) noexcept {
  std::uint32_t result = 0;
  for (std::uint32_t i = 0; i < count; ++i) result += ((coarse(a[i]) ^ coarse(b[i])) & wide(mask[i])) != 0 ? 1 : 0;
  return result;
}

__attribute__((target("avx2"))) inline __m256i load_eight(const std::uint32_t* from) noexcept {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

__attribute__((target("avx2"))) std::uint32_t differing_avx2(const std::uint32_t* a, const std::uint32_t* b,
                                                             const std::int8_t* mask, std::uint32_t count) noexcept {
  const __m256i large = _mm256_set1_epi32(kLargeLimit);
  __m256i same = _mm256_setzero_si256();  // less one for each
  std::uint32_t at = 0;
  for (; at + 8 <= count; at += 8) {
    const __m256i apart =
        _mm256_xor_si256(_mm256_min_epu32(load_eight(a + at), large), _mm256_min_epu32(load_eight(b + at), large));
    same = _mm256_add_epi32(same,
                            _mm256_cmpeq_epi32(_mm256_and_si256(apart, wide_mask(mask + at)), _mm256_setzero_si256()));
  }
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(same), _mm256_extracti128_si256(same, 1));
  sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
  sum = _mm_add_epi32(sum, _mm_srli_epi64(sum, 32));
  return at + static_cast<std::uint32_t>(_mm_cvtsi128_si32(sum)) + differing(a + at, b + at, mask + at, count - at);
}

// A bit a word that the mask keeps and that is not the same; `count` is at most 64.
std::uint64_t apart(const std::uint32_t* a, const std::uint32_t* b, const std::int8_t* mask,
                    std::uint32_t count) noexcept {
  std::uint64_t bits = 0;
  for (std::uint32_t i = 0; i < count; ++i) bits |= std::uint64_t{((a[i] ^ b[i]) & wide(mask[i])) != 0} << i;
  return bits;
}

__attribute__((target("avx2"))) std::uint64_t apart_avx2(const std::uint32_t* a, const std::uint32_t* b,
                                                         const std::int8_t* mask, std::uint32_t count) noexcept {
  std::uint64_t bits = 0;
  std::uint32_t at = 0;
  for (; at + 8 <= count; at += 8) {
    const __m256i same = _mm256_cmpeq_epi32(
        _mm256_and_si256(_mm256_xor_si256(load_eight(a + at), load_eight(b + at)), wide_mask(mask + at)),
        _mm256_setzero_si256());
    bits |= std::uint64_t{~static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(same))) & 0xff} << at;
  }
  return at == count ? bits : bits | apart(a + at, b + at, mask + at, count - at) << at;
}

// A bit a word that lies between; `count` is at most 64.
std::uint64_t between(const std::uint32_t* words, std::uint32_t count, std::uint32_t least,
                      std::uint32_t most) noexcept {
  std::uint64_t bits = 0;
  for (std::uint32_t i = 0; i < count; ++i) bits |= std::uint64_t{words[i] - least <= most - least} << i;
  return bits;
}

__attribute__((target("avx2"))) std::uint64_t between_avx2(const std::uint32_t* words, std::uint32_t count,
                                                           std::uint32_t least, std::uint32_t most) noexcept {
  const __m256i from = _mm256_set1_epi32(static_cast<int>(least));
  const __m256i span = _mm256_set1_epi32(static_cast<int>(most - least));
  std::uint64_t bits = 0;
  std::uint32_t at = 0;
  for (; at + 8 <= count; at += 8) {
    const __m256i above = _mm256_sub_epi32(load_eight(words + at), from);
    const __m256i inside = _mm256_cmpeq_epi32(_mm256_min_epu32(above, span), above);
    bits |= std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(inside)))} << at;
  }
  return at == count ? bits : bits | between(words + at, count - at, least, most) << at;
}

auto fastest_between() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") ? &between_avx2 : &between;
}

auto fastest_apart() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") ? &apart_avx2 : &apart;
}

auto fastest_differing() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") ? &differing_avx2 : &differing;
}

float log_of(std::uint32_t value) noexcept { return std::log(1.0F + static_cast<float>(value)); }

}  // namespace

Words::Words() noexcept
    : sum_products_(fastest()), differing_(fastest_differing()), apart_(fastest_apart()), between_(fastest_between()) {
  void* const memory =
      mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory != MAP_FAILED) arena_ = static_cast<std::byte*>(memory);
}

Words::~Words() {
  if (arena_ != nullptr) munmap(arena_, kArenaBytes);
}

void* Words::take(std::size_t bytes) noexcept {
  constexpr std::size_t kLine = 64;
  bytes = (bytes + kLine - 1) / kLine * kLine;  // and so masks end with whole steps of sum()
  if (arena_ == nullptr || bytes > kArenaBytes - used_bytes_) return nullptr;
  void* const result = arena_ + used_bytes_;
  used_bytes_ += bytes;
  return result;
}

void Words::meet(const Function& function, std::span<const std::uint32_t> words, const Allocations* allocations,
                 const WordSet* dropped) noexcept {
  // A second function under one number would be a fault of the caller: it goes without words.
  if (function.index >= kMaxFunctions || records_[function.index].identity != 0) return;
  Record& record = records_[function.index];
  record.identity = function.identity;
  const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(words.size(), kMaxWords));
  if (count == 0) return;
  record.mask = static_cast<std::int8_t*>(take(count));
  if (record.mask == nullptr) return;
  record.count = count;
  std::memset(record.mask, -1, count);
  mask_pointers(function, words, allocations);
  if (dropped == nullptr) return;
  for_each(*dropped, [&](std::uint32_t word) {
    if (word < count) record.mask[word] = 0;
  });
  if (Learner* const learner = learner_of(record)) {
    learner->dropped = *dropped;
    learner->any_dropped = true;
  }
}

std::uint64_t Words::sum(const Function& function, std::span<const std::uint32_t> words) const noexcept {
  const Record& record = records_[function.index];
  const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(words.size(), record.count));
  constexpr std::uint32_t kStep = 8;
  const std::uint32_t whole = count - count % kStep;
  std::uint64_t sum = sum_products_(words.data(), record.mask, kHashKeys.data(), whole);
  if (whole < count) {
    std::array<std::uint32_t, kStep> rest{};
    std::copy(words.begin() + whole, words.begin() + count, rest.begin());
    // The mask has room for whole steps; what it says of words that are not there says nothing.
    sum += sum_products_(rest.data(), record.mask + whole, kHashKeys.data() + whole, kStep);
  }
  return sum;
}

std::uint32_t Words::first(const Function& function, std::span<const std::uint32_t> words) const noexcept {
  const Record& record = records_[function.index];
  return record.count == 0 ? 0 : coarse(words[0]) & wide(record.mask[0]);
}

bool Words::mask_pointers(const Function& function, std::span<const std::uint32_t> words,
                          const Allocations* allocations) noexcept {
  Record& record = records_[function.index];
  const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(words.size(), record.count));
  // What has neither's upper half at an odd place is not looked at.
  std::uint32_t least = kLeastUpperHalf;
  std::uint32_t most = kMostUpperHalf;
  if (allocations != nullptr && allocations->lowest_half() <= allocations->highest_half()) {
    least = std::min(least, allocations->lowest_half());
    most = std::max(most, allocations->highest_half());
  }
  bool changed = false;
  for (std::uint32_t begin = 0; begin < count; begin += 64) {
    constexpr std::uint64_t kOddPlaces = 0xaaaa'aaaa'aaaa'aaaaULL;
    std::uint64_t upper =
        between_(words.data() + begin, std::min<std::uint32_t>(64, count - begin), least, most) & kOddPlaces;
    for (; upper != 0; upper &= upper - 1) {
      const std::uint32_t at = begin + static_cast<std::uint32_t>(std::countr_zero(upper)) - 1;
      if ((words[at] | words[at + 1]) == 0 || (record.mask[at] | record.mask[at + 1]) == 0) continue;
      if (!is_pointer(words[at], words[at + 1], allocations) && !is_host_address(words[at], words[at + 1])) continue;
      record.mask[at] = record.mask[at + 1] = 0;
      changed = true;
    }
  }
  return changed;
}

Words::Learner* Words::learner_of(Record& record) noexcept {
  if (record.learner != nullptr) return record.learner;
  void* const memory = take(sizeof(Learner));
  void* const blocks = take(sizeof(std::uint32_t) * kAnchors * record.count);
  if (memory == nullptr || blocks == nullptr) return nullptr;
  record.learner = new (memory) Learner;
  record.learner->blocks = static_cast<std::uint32_t*>(blocks);
  return record.learner;
}

std::uint32_t Words::fresh(const Function& function, std::span<const std::uint32_t> words, std::uint64_t geometry,
                           std::uint64_t key) noexcept {
  if (!knows(function)) return 0;
  Record& record = records_[function.index];
  const std::uint32_t count = record.count;
  if (count == 0 || words.size() < count) return 0;
  Learner* const learner = learner_of(record);
  if (learner == nullptr) return 0;
  const std::uint32_t event = ++learner->events;
  if (event == 0) return 0;

  int nearest = -1;
  std::uint32_t least = std::numeric_limits<std::uint32_t>::max();
  int place = 0;  // of a new anchor
  for (int i = 0; i < kAnchors; ++i) {
    const Anchor& anchor = learner->anchors[static_cast<std::size_t>(i)];
    if (anchor.last_use < learner->anchors[static_cast<std::size_t>(place)].last_use) place = i;
    // What came back is not drawn anew each time, and proves nothing.
    if (anchor.event == 0 || anchor.came_back || anchor.geometry != geometry) continue;
    const std::uint32_t words_apart =
        differing_(words.data(), learner->blocks + static_cast<std::size_t>(i) * count, record.mask, count);
    // Nothing apart: an anchor whose key had words that were dropped since, or that left the cache.
    if (words_apart < least) {
      nearest = i;
      least = words_apart;
    }
  }

  if (nearest >= 0 && least > 0) {
    Anchor& anchor = learner->anchors[static_cast<std::size_t>(nearest)];
    anchor.last_use = event;
    const std::uint32_t* const block = learner->blocks + static_cast<std::size_t>(nearest) * count;
    WordSet difference{};
    std::uint32_t words_apart = 0;
    for (std::uint32_t begin = 0; begin < count; begin += 64) {
      // Large values too, though they count as one: whoever takes them freely may take a small one next.
      const std::uint64_t bits =
          apart_(words.data() + begin, block + begin, record.mask + begin, std::min<std::uint32_t>(64, count - begin));
      difference[begin / 64] = bits;
      words_apart += static_cast<std::uint32_t>(std::popcount(bits));
    }
    const int which = suspect(*learner, difference, words_apart);
    Suspicion& suspicion = learner->suspicions[static_cast<std::size_t>(which)];
    ++suspicion.fresh;
    suspicion.last_use = event;
    Pending& pending = learner->pending[event % kPending];
    pending = {key, event, anchor.event, nearest, which, 0, false};
    for_each(difference, [&](std::uint32_t word) {
      std::uint8_t& times = suspicion.times[word];
      if (times < kFewSamples) ++times;
    });
    for (int i = 0; i < suspicion.tracked; ++i) {
      Track& track = suspicion.tracks[static_cast<std::size_t>(i)];
      const std::uint32_t value = words[track.word];
      if (!track.seen) {
        track.seen = true;
        track.least = track.greatest = track.last = block[track.word];
      }
      track.rising = track.rising && value > track.last;
      track.last = value;
      track.least = std::min(track.least, value);
      track.greatest = std::max(track.greatest, value);
      if (pending.log_value == 0 && value < kLargeLimit && block[track.word] < kLargeLimit) {
        pending.log_value = log_of(value) - log_of(block[track.word]);
      }
    }
    if (suspicion.pairs == 0) judge(record, which);
  }

  // The anchors stay long, so that the values that are compared lie apart, and so that many geometries in turn do not
  // push each other out before a second launch comes.
  Anchor& oldest = learner->anchors[static_cast<std::size_t>(place)];
  const bool has_room = oldest.event == 0 || event - oldest.last_use > kAnchorLife;
  if (has_room && (nearest < 0 || least > 0)) {
    oldest = {geometry, key, event, event, 0, false, false};
    std::memcpy(learner->blocks + static_cast<std::size_t>(place) * count, words.data(), count * sizeof(std::uint32_t));
  }
  return event;
}

// Which suspicion these `count` words belong to: one that has most of them and of which they are most, or a new one.
int Words::suspect(Learner& learner, const WordSet& difference, std::uint32_t count) noexcept {
  int oldest = 0;
  int which = -1;
  for (int i = 0; i < kSuspicions && which < 0; ++i) {
    const Suspicion& suspicion = learner.suspicions[static_cast<std::size_t>(i)];
    if (suspicion.last_use < learner.suspicions[static_cast<std::size_t>(oldest)].last_use) oldest = i;
    if (suspicion.fresh == 0) continue;
    int common = 0;
    for_each(difference, [&](std::uint32_t word) { common += has(suspicion.words, word) ? 1 : 0; });
    if (2 * common > std::max(static_cast<int>(count), suspicion.size)) which = i;
  }
  if (which < 0) {
    which = oldest;
    learner.suspicions[static_cast<std::size_t>(which)] = Suspicion{};
  }
  Suspicion& suspicion = learner.suspicions[static_cast<std::size_t>(which)];
  for_each(difference, [&](std::uint32_t word) {
    if (has(suspicion.words, word)) return;
    insert(suspicion.words, word);
    ++suspicion.size;
    if (suspicion.tracked < kTracked) suspicion.tracks[static_cast<std::size_t>(suspicion.tracked++)].word = word;
  });
  return which;
}

void Words::judge(Record& record, int which) noexcept {
  Learner& learner = *record.learner;
  Suspicion& suspicion = learner.suspicions[static_cast<std::size_t>(which)];
  bool small = false;   // numbers that may be sizes and do not lie far apart
  bool counted = true;  // every word is large or rising
  for (int i = 0; i < suspicion.tracked; ++i) {
    const Track& track = suspicion.tracks[static_cast<std::size_t>(i)];
    const bool far_apart = track.greatest >= kFarOut && track.greatest / kFarApart >= track.least;
    if (track.greatest < kSizeLimit && !far_apart) small = true;
    if (track.greatest < kLargeLimit && !track.rising) counted = false;
  }
  const auto pairs = static_cast<float>(suspicion.pairs);
  const float mean = suspicion.pairs > 1 ? suspicion.sum_distance / (pairs - 1) : 0;
  // The correlation of log time with log value.
  const float spread_x = std::max(pairs * suspicion.sum_xx - suspicion.sum_x * suspicion.sum_x, 0.0F);
  const float spread_y = std::max(pairs * suspicion.sum_yy - suspicion.sum_y * suspicion.sum_y, 0.0F);
  const float spread = std::sqrt(spread_x * spread_y);
  const float follows = spread > 0 ? (pairs * suspicion.sum_xy - suspicion.sum_x * suspicion.sum_y) / spread : 0;
  const bool comes_back = 4 * suspicion.returned > suspicion.fresh;

  bool free = false;
  if (suspicion.pairs == 0) {
    free = suspicion.fresh >= kBlindValues && counted;
  } else if (suspicion.pairs >= kFewSamples && mean <= kNoiseLog) {
    free = !small && (mean <= kNoiseLog / 4 || follows < 0.5F);
  }
  if (!free && suspicion.pairs >= kManySamples) free = mean <= kLoudNoiseLog && follows < 0.35F;
  if (free && !comes_back) {
    for_each(suspicion.words, [&](std::uint32_t word) {
      if (suspicion.times[word] < kFewSamples / 2) return;
      record.mask[word] = 0;
      insert(learner.dropped, word);
    });
    learner.any_dropped = true;
    suspicion = Suspicion{};
  } else if (suspicion.pairs >= kManySamples || (suspicion.pairs >= 2 * kFewSamples && mean > kLoudNoiseLog)) {
    // Evidence against it; what it looked like may still come apart into words that are free and words that are not.
    suspicion = Suspicion{};
  }
}

void Words::returned(std::uint32_t function_index, std::uint64_t key) noexcept {
  if (function_index >= kMaxFunctions) return;
  Learner* const learner = records_[function_index].learner;
  if (learner == nullptr) return;
  for (Anchor& anchor : learner->anchors) {
    if (anchor.event != 0 && anchor.key == key) anchor.came_back = true;
  }
  for (Pending& pending : learner->pending) {
    if (pending.event == 0 || pending.key != key || pending.came_back) continue;
    pending.came_back = true;
    ++learner->suspicions[static_cast<std::size_t>(pending.suspicion)].returned;
  }
}

void Words::measured(std::uint32_t function_index, std::uint32_t event, float log_ns) noexcept {
  if (function_index >= kMaxFunctions || event == 0) return;
  Record& record = records_[function_index];
  Learner* const learner = record.learner;
  if (learner == nullptr) return;
  for (Anchor& anchor : learner->anchors) {
    if (anchor.event != event || anchor.measured) continue;
    anchor.log_ns = log_ns;
    anchor.measured = true;
  }
  Pending& pending = learner->pending[event % kPending];
  if (pending.event != event) return;
  pending.event = 0;
  const Anchor& anchor = learner->anchors[static_cast<std::size_t>(pending.anchor)];
  Suspicion& suspicion = learner->suspicions[static_cast<std::size_t>(pending.suspicion)];
  if (anchor.event != pending.anchor_event || !anchor.measured || suspicion.fresh == 0) return;
  const float distance = log_ns - anchor.log_ns;
  // From the mean so far: the anchor is often a kernel's first launch, which finds cold caches.
  if (suspicion.pairs > 0) {
    suspicion.sum_distance += std::abs(distance - suspicion.sum_y / static_cast<float>(suspicion.pairs));
  }
  ++suspicion.pairs;
  suspicion.sum_x += pending.log_value;
  suspicion.sum_y += distance;
  suspicion.sum_xx += pending.log_value * pending.log_value;
  suspicion.sum_xy += pending.log_value * distance;
  suspicion.sum_yy += distance * distance;
  judge(record, pending.suspicion);
}

}  // namespace cudasched::predict
