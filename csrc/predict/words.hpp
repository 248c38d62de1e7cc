// Which words of a kernel's parameter block belong to its prediction key.
//
// The key has the whole block, less pointers and addresses of the host's (stack garbage in unfilled arrays).
// Allocations knows pointers; without Allocations, words that look like an address are pointers. A word that held a
// pointer once is out from then on. Of a word that is too large for a size only that fact counts, not the value:
// launches that differ only there last the same. Such words (2^28 and more) are floats, magic numbers of divisions, low
// halves of addresses. A constant word does no harm in the key. When that constant changes (the K of a GEMM after a
// long run of one K), the key changes at once. sum() is one pass over the block: a universal hash (NH of Black et al.,
// 1999), 8 bytes a multiplication, the same in every run.
//
// Masks are stored in an arena of reserved address space for kMaxFunctions blocks of the greatest length. The kernel
// gives out only the touched pages. A function beyond that number, or one whose mask finds no room, is examined at each
// launch. All its words but pointers count, so that no launch takes another's key. Such functions are counted.
//
// Not thread-safe: the predictor's caller holds a lock. No allocation and no system call after construction.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "predict/allocations.hpp"
#include "predict/function.hpp"

namespace cudasched::predict {

inline constexpr std::uint32_t kMaxFunctions = 4096;
// The upper halves of addresses, where Linux puts position-independent programs with their heaps, and mappings.
#if defined(__x86_64__)
inline constexpr std::uint32_t kProgramHalf = 0x5500, kMappedHalf = 0x7000;
#else
inline constexpr std::uint32_t kProgramHalf = 0xaa00, kMappedHalf = 0xf000;
#endif
inline constexpr std::uint32_t kMaxWords = Function::kMaxParameterBytes / 4;

// Whether two neighbours, the first at an even place, are a pointer.
inline bool is_pointer(std::uint32_t low, std::uint32_t high, const Allocations* allocations) noexcept {
  if (allocations != nullptr) {
    return high >> (Allocations::kAddressBits - 32) == 0 && allocations->contains(std::uint64_t{high} << 32 | low);
  }
  // The region that Linux maps from, where CUDA puts unified addresses. Two sizes side by side look like that only if
  // the first is over a million and the second in a narrow range. That range is 28,672 to 32,767 (61,440 to 65,535 on
  // arm64).
  return high >> 12 == kMappedHalf >> 12 && low >> 20 != 0;
}

// Whether two neighbours are an address of the program's own code, stack, heap or mappings. No kernel reads such words;
// unfilled arrays hold them. The ranges are those of Linux. On x86-64 a size of 32,256 to 32,767 or 21,760 to 22,271
// after one of a million and more looks like such an address.
inline bool is_host_address(std::uint32_t low, std::uint32_t high) noexcept {
  constexpr std::uint32_t kLast = kMappedHalf + 0xe00;
  return (high - kLast < 0x200 || high - kProgramHalf < 0x200) && low >> 20 != 0;
}

// Of either kind.
inline bool is_address(std::uint32_t low, std::uint32_t high, const Allocations* allocations) noexcept {
  return is_pointer(low, high, allocations) || is_host_address(low, high);
}

// No address has an upper half outside of these; so a block is searched for those alone.
struct UpperHalves {
  explicit UpperHalves(const Allocations* allocations) noexcept {
    if (allocations == nullptr || allocations->lowest_half() > allocations->highest_half()) return;
    least = std::min(least, allocations->lowest_half());
    most = std::max(most, allocations->highest_half());
  }

  std::uint32_t least = kProgramHalf;
  std::uint32_t most = kMappedHalf + 0xfff;
};

class Words {
 public:
  static constexpr std::size_t kArenaBytes = std::size_t{kMaxFunctions} * kMaxWords;

  explicit Words(std::size_t arena_bytes = kArenaBytes) noexcept;
  ~Words();
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  // Must outlive this object; null: a word that looks like an address is a pointer.
  void use_allocations(const Allocations* allocations) noexcept { allocations_ = allocations; }

  // Whether the function has a mask of its own.
  bool knows(const Function& function) const noexcept {
    return function.index < kMaxFunctions && records_[function.index].identity == function.identity;
  }

  // The function's first launch.
  void meet(const Function& function, std::span<const std::uint32_t> words) noexcept;

  // The first word, or 0 if that is masked; for blocks that are not empty.
  std::uint32_t first(const Function& function, std::span<const std::uint32_t> words) const noexcept;

  // The words' part of the key.
  std::uint64_t sum(const Function& function, std::span<const std::uint32_t> words) const noexcept;

  // Takes out pointers that earlier launches did not have there; says whether there were any, and the sum has changed.
  bool mask_pointers(const Function& function, std::span<const std::uint32_t> words) noexcept;

  std::size_t used_bytes() const noexcept { return used_bytes_; }

  // Functions that have no mask because the table or the arena is full; one beyond the table counts at each meeting.
  std::uint32_t without_room() const noexcept { return without_room_; }

 private:
  using SumProducts = std::uint64_t(const std::uint32_t* words, const std::int8_t* mask, const std::uint32_t* keys,
                                    std::uint32_t count) noexcept;

  struct Record {
    std::uint64_t identity = 0;
    std::int8_t* mask = nullptr;  // -1 or 0 a word
    std::uint32_t count = 0;
  };

  std::int8_t* take(std::size_t bytes) noexcept;
  std::uint64_t masked_sum(std::span<const std::uint32_t> words, const std::int8_t* mask) const noexcept;
  bool mask_pointers(std::span<const std::uint32_t> words, std::int8_t* mask) const noexcept;

  SumProducts* sum_products_;  // the version for this processor
  std::uint64_t (*between_)(const std::uint32_t* words, std::uint32_t count, std::uint32_t least,
                            std::uint32_t most) noexcept;
  const Allocations* allocations_ = nullptr;
  std::byte* arena_ = nullptr;
  std::size_t arena_bytes_;
  std::size_t used_bytes_ = 0;
  std::uint32_t without_room_ = 0;
  std::array<Record, kMaxFunctions> records_{};
};

}  // namespace cudasched::predict
