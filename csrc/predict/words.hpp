// Which words of a kernel's parameter block belong to its prediction key, learned for each kernel as it is launched.
//
// The key has the whole block, less what is out: words of pointers (Allocations knows them; without Allocations, what
// looks like an address), and words that vary freely without changing the duration: Philox offsets, step counters, the
// stack garbage in unfilled arrays. Where that garbage is an address of the host's, its words are out at once. Of a
// word that is too large for a size (2^28 and more: floats, magic numbers of divisions, low halves of addresses) only
// that counts, not its value: launches that differ in it alone last the same. A constant costs nothing there and says
// nothing, and the day it changes (the K of a GEMM after a long run of one K) the key is another at once. sum() is one
// pass over the block, a universal hash (NH of Black et al., 1999) of 8 bytes a multiplication, the same in every run.
//
// How a free word is found. A launch whose key is new is compared with anchors, earlier launches of the kernel with
// the same geometry; the words in which it differs from the nearest one are a suspicion, and what both lasted is
// evidence. A suspicion holds, and its words are dropped for good, after
//   - kFewSamples measured pairs that agree within kNoiseLog in the mean; small numbers, which may be sizes, must have
//     taken values that are far apart, or
//   - kManySamples measured pairs that agree within kLoudNoiseLog and do not follow the value, or
//   - kBlindValues new values without a measurement, if all are large numbers or each is above the last.
// Keys that come back speak against it: what is drawn anew each time does not come back. Only the words that differed
// kFewSamples / 2 times go.
//
// Dropping changes the kernel's keys, once: each is met as new one more time.
//
// Not thread-safe: the predictor's caller holds a lock. No allocation and no system call after construction: masks and
// anchors lie in an arena of reserved address space, of which the kernel gives out what is touched. A function that
// finds no room has no words in its key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "predict/allocations.hpp"
#include "predict/function.hpp"

namespace cudasched::predict {

inline constexpr std::uint32_t kMaxFunctions = 4096;
inline constexpr std::uint32_t kMaxWords = Function::kMaxParameterBytes / 4;

// A bit a word of the block.
using WordSet = std::array<std::uint64_t, kMaxWords / 64>;

// Whether two neighbours, the first at an even place, are a pointer.
inline bool is_pointer(std::uint32_t low, std::uint32_t high, const Allocations* allocations) noexcept {
  if (allocations != nullptr) {
    return high >> (Allocations::kAddressBits - 32) == 0 && allocations->contains(std::uint64_t{high} << 32 | low);
  }
  // The region that Linux maps from, which is where CUDA puts unified addresses. Two sizes side by side look like that
  // only if the first is over a million and the second between 28,672 and 32,767.
  return high >> 12 == 7 && low >> 20 != 0;
}

// Whether two neighbours are an address of the program's own code, stack, heap or mappings: nothing that a kernel
// reads, but what an unfilled array holds. The ranges are those where Linux puts them (x86-64, position-independent
// programs at 0x55.. and 0x56..); a size of 32,256 to 32,767 or 21,760 to 22,271 after one of a million and more looks
// like it.
inline bool is_host_address(std::uint32_t low, std::uint32_t high) noexcept {
  return (high - 0x7e00 < 0x200 || high - 0x5500 < 0x200) && low >> 20 != 0;
}

class Words {
 public:
  static constexpr std::size_t kArenaBytes = std::size_t{32} << 20;
  static constexpr int kFewSamples = 8;
  static constexpr int kManySamples = 64;
  static constexpr int kBlindValues = 32;
  static constexpr float kNoiseLog = 0.05F;
  static constexpr float kLoudNoiseLog = 0.3F;

  Words() noexcept;
  ~Words();
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  // Whether the function's launches have been looked at; if not, meet() comes before sum().
  bool knows(const Function& function) const noexcept {
    return function.index < kMaxFunctions && records_[function.index].identity == function.identity;
  }

  // The function's first launch. `dropped` may be null: words that earlier runs found to be free.
  void meet(const Function& function, std::span<const std::uint32_t> words, const Allocations* allocations,
            const WordSet* dropped) noexcept;

  // The first word, or 0 if it is out; for functions that are known, and blocks that are not empty.
  std::uint32_t first(const Function& function, std::span<const std::uint32_t> words) const noexcept;

  // The words' part of the key; for functions that are known.
  std::uint64_t sum(const Function& function, std::span<const std::uint32_t> words) const noexcept;

  // Takes out pointers that earlier launches did not have there; says whether there were any, and the sum has changed.
  bool mask_pointers(const Function& function, std::span<const std::uint32_t> words,
                     const Allocations* allocations) noexcept;

  // A launch with a new key. The number, never 0 where something is to be learned, is for measured().
  std::uint32_t fresh(const Function& function, std::span<const std::uint32_t> words, std::uint64_t geometry,
                      std::uint64_t key) noexcept;

  // A key that fresh() was told of was used for the second time.
  void returned(std::uint32_t function_index, std::uint64_t key) noexcept;

  // What that launch lasted, as a natural logarithm.
  void measured(std::uint32_t function_index, std::uint32_t event, float log_ns) noexcept;

  // The words that were dropped; null where there are none.
  const WordSet* dropped(std::uint32_t function_index) const noexcept {
    const Learner* const learner = records_[function_index].learner;
    return learner != nullptr && learner->any_dropped ? &learner->dropped : nullptr;
  }

 private:
  static constexpr int kAnchors = 8;
  static constexpr int kPending = 16;
  static constexpr int kSuspicions = 4;
  static constexpr int kTracked = 8;
  static constexpr std::uint32_t kAnchorLife = 32;  // new keys without use, after which an anchor gives way

  struct Anchor {
    std::uint64_t geometry = 0;
    std::uint64_t key = 0;
    std::uint32_t event = 0;  // 0: free
    std::uint32_t last_use = 0;
    float log_ns = 0;
    bool measured = false;
    bool came_back = false;
  };

  struct Pending {
    std::uint64_t key = 0;
    std::uint32_t event = 0;  // 0: free
    std::uint32_t anchor_event = 0;
    int anchor = 0;
    int suspicion = 0;
    float log_value = 0;  // of a word that may be a size, less the anchor's
    bool came_back = false;
  };

  // The values that a suspected word has taken.
  struct Track {
    std::uint32_t word = 0;
    std::uint32_t least = 0;
    std::uint32_t greatest = 0;
    std::uint32_t last = 0;
    bool rising = true;
    bool seen = false;
  };

  struct Suspicion {
    WordSet words{};
    std::array<std::uint8_t, kMaxWords> times{};  // how often each word differed, counted up to kFewSamples
    int size = 0;                                 // of `words`
    int fresh = 0;
    int returned = 0;
    int pairs = 0;
    float sum_distance = 0;
    float sum_x = 0;  // x: distance in log value, y: distance in log time
    float sum_y = 0;
    float sum_xx = 0;
    float sum_xy = 0;
    float sum_yy = 0;
    std::uint32_t last_use = 0;
    int tracked = 0;
    std::array<Track, kTracked> tracks{};
  };

  struct Learner {
    std::uint32_t events = 0;
    bool any_dropped = false;
    WordSet dropped{};
    std::array<Anchor, kAnchors> anchors{};
    std::array<Pending, kPending> pending{};
    std::array<Suspicion, kSuspicions> suspicions{};
    std::uint32_t* blocks = nullptr;  // one an anchor, `count` words each
  };

  struct Record {
    std::uint64_t identity = 0;
    std::int8_t* mask = nullptr;  // -1 or 0 a word
    Learner* learner = nullptr;
    std::uint32_t count = 0;
  };

  void* take(std::size_t bytes) noexcept;
  Learner* learner_of(Record& record) noexcept;
  int suspect(Learner& learner, const WordSet& difference, std::uint32_t count) noexcept;
  void judge(Record& record, int suspicion) noexcept;

  using SumProducts = std::uint64_t(const std::uint32_t* words, const std::int8_t* mask, const std::uint32_t* keys,
                                    std::uint32_t count) noexcept;

  using Differing = std::uint32_t(const std::uint32_t* a, const std::uint32_t* b, const std::int8_t* mask,
                                  std::uint32_t count) noexcept;

  SumProducts* sum_products_;  // by what the processor has
  Differing* differing_;
  std::uint64_t (*apart_)(const std::uint32_t* a, const std::uint32_t* b, const std::int8_t* mask,
                          std::uint32_t count) noexcept;
  std::uint64_t (*between_)(const std::uint32_t* words, std::uint32_t count, std::uint32_t least,
                            std::uint32_t most) noexcept;
  std::byte* arena_ = nullptr;
  std::size_t used_bytes_ = 0;
  std::array<Record, kMaxFunctions> records_{};
};

}  // namespace cudasched::predict
