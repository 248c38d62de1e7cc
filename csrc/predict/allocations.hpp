// The addresses that are, or have been, memory known to CUDA: device, managed, pinned, reserved. They tell which words
// of a parameter block are pointers. One bit for each 2 MiB of the address space, never cleared: an address that was
// memory once is still no shape.
//
// contains() is two loads, from any thread. add() too may be called from any thread and allocates nothing: the bits lie
// in 8 MiB of address space of which the kernel gives out the touched pages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace cudasched::predict {

class Allocations {
 public:
  static constexpr int kPageBits = 21;
#if defined(__x86_64__)
  static constexpr int kAddressBits = 47;
#else
  static constexpr int kAddressBits = 48;
#endif

  // No address lies outside these upper halves, so they tell sizes from addresses without a look at the table.
  std::uint32_t lowest_half() const noexcept { return lowest_half_.load(std::memory_order_relaxed); }
  std::uint32_t highest_half() const noexcept { return highest_half_.load(std::memory_order_relaxed); }

  // Throws Error if the address space cannot be had.
  Allocations();
  ~Allocations();
  Allocations(const Allocations&) = delete;
  Allocations& operator=(const Allocations&) = delete;

  void add(std::uint64_t address, std::uint64_t bytes) noexcept;

  bool contains(std::uint64_t address) const noexcept {
    if (address >> kAddressBits != 0) return false;
    const std::uint64_t page = address >> kPageBits;
    return (bits_[page / 64].load(std::memory_order_relaxed) >> (page % 64) & 1) != 0;
  }

 private:
  std::atomic<std::uint64_t>* bits_;
  std::atomic<std::uint32_t> lowest_half_{~std::uint32_t{0}};
  std::atomic<std::uint32_t> highest_half_{0};
};

}  // namespace cudasched::predict
