// Maps a driver's handle to a few words about that handle. A lookup takes a few loads, on any thread, without a lock or
// an allocation. It sees the words of one write together, never another handle's. A known handle stays known to every
// lookup while its words are written anew.
//
// The table grows, up to a bound of live handles; past that bound set() returns false, and the caller treats the handle
// as unknown. Memory: at most eight times the need of the live handles at their peak, freed by the destructor alone.
// Writers hold a lock of the caller's.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "base/hash.hpp"

namespace cudasched {

template <typename Handle>
std::uint64_t handle_word(Handle* handle) noexcept {
  return reinterpret_cast<std::uintptr_t>(handle);
}

template <std::size_t kWords>
class HandleTable {
 public:
  using Words = std::array<std::uint64_t, kWords>;
  static constexpr std::size_t kMost = std::size_t{1} << 17;

  explicit constexpr HandleTable(std::size_t most = kMost) noexcept : most_(most) {}
  ~HandleTable() {
    for (Block* block = every_; block != nullptr;) {
      Block* const next = block->next;
      delete block;
      block = next;
    }
  }
  HandleTable(const HandleTable&) = delete;
  HandleTable& operator=(const HandleTable&) = delete;

  // False where the handle is not known.
  bool find(std::uint64_t handle, Words& words) const noexcept {
    while (true) {
      const std::uint64_t published = published_.load(std::memory_order_acquire);
      const Block* const block = current_.load(std::memory_order_acquire);
      const Slot* const slot = block == nullptr ? nullptr : slot_of(*block, handle);
      const bool found = slot != nullptr && read(*slot, words);
      // A block that was replaced twice meanwhile may have been filled anew under this lookup.
      if (published_.load(std::memory_order_relaxed) == published) return found;
    }
  }
  bool contains(std::uint64_t handle) const noexcept {
    Words words{};
    return find(handle, words);
  }

  // ---- writers

  // False at the bound, without memory, and for handle 0.
  bool set(std::uint64_t handle, const Words& words) noexcept {
    Slot* const slot = claim(handle);
    if (slot == nullptr) return false;
    const std::uint64_t stamp = slot->stamp.load(std::memory_order_relaxed);
    const std::uint64_t next = after(stamp);
    // Into the copy that no lookup reads. One that began two writes ago may: a lookup that sees a new word also sees
    // the write between.
    auto& copy = slot->words[place_of(next)];
    for (std::size_t i = 0; i < kWords; ++i) copy[i].store(words[i], std::memory_order_release);
    slot->stamp.store(next | kKnown, std::memory_order_release);
    if ((stamp & kKnown) == 0) ++size_;
    return true;
  }

  // One word of a known handle. A concurrent lookup may see any state of the other words.
  bool set_word(std::uint64_t handle, std::size_t index, std::uint64_t word) noexcept {
    Slot* const slot = known(handle);
    if (slot == nullptr) return false;
    const std::uint64_t stamp = slot->stamp.load(std::memory_order_relaxed);
    slot->words[place_of(stamp)][index].store(word, std::memory_order_release);
    return true;
  }

  bool erase(std::uint64_t handle) noexcept {
    Slot* const slot = known(handle);
    if (slot != nullptr) forget(*slot);
    return slot != nullptr;
  }

  // Forgets every handle for which `wanted(handle, words)` says true.
  template <typename Wanted>
  void erase_if(Wanted&& wanted) noexcept {
    Block* const block = current_.load(std::memory_order_relaxed);
    for (std::size_t i = 0; block != nullptr && i < block->count; ++i) {
      Slot& slot = block->slots[i];
      Words words{};
      if (read(slot, words) && wanted(slot.handle.load(std::memory_order_relaxed), words)) forget(slot);
    }
  }
  void clear() noexcept {
    erase_if([](std::uint64_t, const Words&) { return true; });
  }

  // In a forked child, where a writer of the parent may have been in the middle of something: empty, with new blocks.
  void abandon() noexcept {
    current_.store(nullptr, std::memory_order_release);
    published_.fetch_add(1, std::memory_order_acq_rel);
    size_ = used_ = 0;
    spare_ = nullptr;
  }

  // On any thread.
  std::size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

  // The size of all blocks, for tests of the bound.
  std::size_t bytes() const noexcept {
    std::size_t sum = 0;
    for (const Block* block = every_; block != nullptr; block = block->next) sum += block->count * sizeof(Slot);
    return sum;
  }

 private:
  static constexpr std::size_t kLeast = 256;  // slots
  static constexpr std::uint64_t kKnown = 1;

  // The handle of a slot never changes while its block is in use. So a lookup that has found a handle may go on reading
  // there. `stamp`: kKnown, and a number that each write raises; even or odd tells the copy of the words that was
  // written last.
  struct Slot {
    std::atomic<std::uint64_t> handle{0};
    std::atomic<std::uint64_t> stamp{0};
    std::array<std::array<std::atomic<std::uint64_t>, kWords>, 2> words{};
  };

  static constexpr std::uint64_t after(std::uint64_t stamp) noexcept { return ((stamp >> 1) + 1) << 1; }
  static constexpr std::size_t place_of(std::uint64_t stamp) noexcept { return (stamp >> 1) & 1; }

  struct Block {
    explicit Block(std::size_t slot_count) noexcept : count(slot_count), slots(new(std::nothrow) Slot[slot_count]) {}
    const std::size_t count;  // a power of two; five eighths of them hold a handle at most
    const std::unique_ptr<Slot[]> slots;
    Block* next = nullptr;  // of all blocks
  };

  static Slot* slot_of(const Block& block, std::uint64_t handle) noexcept {
    const std::size_t mask = block.count - 1;
    std::size_t at = static_cast<std::size_t>(mix(0, handle) >> 20) & mask;
    for (std::size_t tries = 0; tries < block.count; ++tries, at = (at + 1) & mask) {
      const std::uint64_t found = block.slots[at].handle.load(std::memory_order_acquire);
      if (found == handle) return handle == 0 ? nullptr : &block.slots[at];
      if (found == 0) return nullptr;
    }
    return nullptr;
  }

  static bool read(const Slot& slot, Words& words) noexcept {
    for (std::uint64_t stamp = slot.stamp.load(std::memory_order_acquire); (stamp & kKnown) != 0;) {
      const auto& copy = slot.words[place_of(stamp)];
      for (std::size_t i = 0; i < kWords; ++i) words[i] = copy[i].load(std::memory_order_acquire);
      const std::uint64_t again = slot.stamp.load(std::memory_order_acquire);
      if (again == stamp) return true;
      stamp = again;
    }
    return false;
  }

  void forget(Slot& slot) noexcept {
    slot.stamp.store(after(slot.stamp.load(std::memory_order_relaxed)), std::memory_order_release);
    --size_;
  }

  Slot* known(std::uint64_t handle) noexcept {
    Block* const block = current_.load(std::memory_order_relaxed);
    Slot* const slot = block == nullptr ? nullptr : slot_of(*block, handle);
    return slot != nullptr && (slot->stamp.load(std::memory_order_relaxed) & kKnown) != 0 ? slot : nullptr;
  }

  // The handle's slot, existing or new.
  Slot* claim(std::uint64_t handle) noexcept {
    if (handle == 0) return nullptr;
    Block* block = current_.load(std::memory_order_relaxed);
    if (block != nullptr) {
      Slot* const slot = slot_of(*block, handle);
      if (slot != nullptr && ((slot->stamp.load(std::memory_order_relaxed) & kKnown) != 0 || size_ < most_))
        return slot;
    }
    if (size_ >= most_) return nullptr;
    if (block == nullptr || (used_ + 1) * 8 > block->count * 5) {
      if (!rebuild()) return nullptr;
      block = current_.load(std::memory_order_relaxed);
    }
    ++used_;
    return place(*block, handle);
  }

  static Slot* place(Block& block, std::uint64_t handle) noexcept {
    const std::size_t mask = block.count - 1;
    std::size_t at = static_cast<std::size_t>(mix(0, handle) >> 20) & mask;
    while (block.slots[at].handle.load(std::memory_order_relaxed) != 0) at = (at + 1) & mask;
    block.slots[at].handle.store(handle, std::memory_order_release);
    return &block.slots[at];
  }

  // Copies the known handles into a block with room: the spare one if large enough, else a new one.
  bool rebuild() noexcept {
    Block* const old = current_.load(std::memory_order_relaxed);
    std::size_t count = std::bit_ceil((size_ + 1) * 2);
    if (count < kLeast) count = kLeast;
    if (old != nullptr && count < old->count) count = old->count;
    Block* fresh = spare_;
    if (fresh == nullptr || fresh->count != count) {
      fresh = new (std::nothrow) Block(count);
      if (fresh == nullptr || fresh->slots == nullptr) {
        delete fresh;
        return false;
      }
      fresh->next = every_;
      every_ = fresh;
    } else {
      for (std::size_t i = 0; i < count; ++i) {
        Slot& slot = fresh->slots[i];
        slot.stamp.store(0, std::memory_order_release);
        slot.handle.store(0, std::memory_order_release);
      }
    }
    used_ = 0;
    for (std::size_t i = 0; old != nullptr && i < old->count; ++i) {
      const Slot& from = old->slots[i];
      Words words{};
      if (!read(from, words)) continue;
      Slot* const to = place(*fresh, from.handle.load(std::memory_order_relaxed));
      auto& copy = to->words[place_of(kKnown)];
      for (std::size_t j = 0; j < kWords; ++j) copy[j].store(words[j], std::memory_order_release);
      to->stamp.store(kKnown, std::memory_order_release);
      ++used_;
    }
    current_.store(fresh, std::memory_order_release);
    published_.fetch_add(1, std::memory_order_acq_rel);
    spare_ = old;
    return true;
  }

  std::atomic<std::uint64_t> published_{0};
  std::atomic<Block*> current_{nullptr};
  const std::size_t most_;
  std::atomic<std::size_t> size_{0};  // handles that are known
  std::size_t used_ = 0;              // slots of the current block with a handle, known or forgotten
  Block* spare_ = nullptr;
  Block* every_ = nullptr;
};

}  // namespace cudasched
