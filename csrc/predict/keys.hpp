// From a launch to the key of its history: launches of one key are predicted by the times of the others.
//
// The key is the kernel, its geometry and the words of the parameter block that matter (words.hpp). Kernels whose work
// shows in their geometry (elementwise, copies, indexing, fills; by name) share a key with all launches of one geometry
// and first word. The first word is a size and never padding. The other differences are offsets, scalars, and stack
// contents in padding and unfilled arrays. Other kernels, matrix products above all, never share a key: their sizes may
// stand anywhere. For lists of tensors and PyTorch's reductions the key has the work alone (work.hpp): the rest of
// these blocks is left over from earlier calls. Keys of kernels are the same in every run; none is 0.
//
// Not thread-safe: the predictor's caller holds a lock. No allocation.
#pragma once

#include <cstdint>

#include "base/hash.hpp"
#include "predict/launch.hpp"
#include "predict/words.hpp"

namespace cudasched::predict {

class Keys {
 public:
  Words& words() noexcept { return words_; }
  const Words& words() const noexcept { return words_; }

  // Independent products, so that the processor need not wait from one word to the next.
  static std::uint64_t geometry_of(const Launch& launch) noexcept {
    const std::uint64_t words[] = {pair(launch.grid[0], launch.grid[1]), pair(launch.grid[2], launch.block[0]),
                                   pair(launch.block[1], launch.block[2]), pair(launch.cluster[0], launch.cluster[1]),
                                   pair(launch.cluster[2], launch.dynamic_shared_bytes)};
    std::uint64_t sum = 0;
    std::uint64_t seed = 1;
    for (const std::uint64_t word : words) sum += mix(seed++ * 0xd6e8'feb8'6659'fd93ULL, word);
    return sum;
  }

  // The kernel in its launch shape.
  static std::uint64_t shape_of(const Query& query, std::uint64_t geometry) noexcept {
    return mix(
        query.function != nullptr ? query.function->identity : reinterpret_cast<std::uintptr_t>(query.launch.function),
        geometry);
  }

  static bool has_words(const Query& query) noexcept { return query.function != nullptr && !query.words.empty(); }

  // Whether the kernel's work shows in its geometry. A tile in its name speaks of a matrix product.
  static bool may_share(const Query& query) noexcept {
    if (!has_words(query)) return false;
    const NameTraits& traits = query.function->traits;
    switch (static_cast<Family>(traits.family)) {
      case Family::kElementwise:
      case Family::kIndex:
      case Family::kCopy:
      case Family::kMemory:
        return traits.tile[0] == 0;
      default:
        return false;
    }
  }

  // Of the launches that share one; where may_share().
  std::uint64_t shared(const Query& query, std::uint64_t geometry) const noexcept {
    return finished(mix(shape_of(query, geometry), words_.first(*query.function, query.words)));
  }

  // By all words that matter.
  std::uint64_t own(const Query& query, std::uint64_t geometry) const noexcept;

  // A shared key's tag of the key that the words would give.
  static std::uint16_t tag_of(std::uint64_t own_key) noexcept { return static_cast<std::uint16_t>(own_key | 1); }

  // `critical_path_ns` is 0 where it is unknown. In this run alone, as handles are.
  static std::uint64_t of_graph(const void* graph, std::int64_t critical_path_ns) noexcept {
    constexpr std::uint64_t kGraphSeed = 0x6772'6170'6873ULL;
    return mix(mix(kGraphSeed, reinterpret_cast<std::uintptr_t>(graph)), static_cast<std::uint64_t>(critical_path_ns)) |
           1;
  }

 private:
  static std::uint64_t pair(std::uint32_t a, std::uint32_t b) noexcept { return std::uint64_t{a} << 32 | b; }

  static std::uint64_t finished(std::uint64_t key) noexcept {
    key ^= key >> 32;
    return key == 0 ? 1 : key;
  }

  Words words_;
};

}  // namespace cudasched::predict
