#include "predict/allocations.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.hpp"

namespace cudasched::predict {
namespace {

constexpr std::uint64_t kPages = std::uint64_t{1} << (Allocations::kAddressBits - Allocations::kPageBits);
constexpr std::size_t kTableBytes = kPages / 8;

}  // namespace

Allocations::Allocations() {
  void* const memory =
      mmap(nullptr, kTableBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error("cannot reserve " + std::to_string(kTableBytes >> 20) +
                " MiB of address space for the table of allocations: " + std::strerror(errno) +
                "; raise the limit on address space (ulimit -v)");
  }
  bits_ = static_cast<std::atomic<std::uint64_t>*>(memory);
}

Allocations::~Allocations() { munmap(bits_, kTableBytes); }

void Allocations::add(std::uint64_t address, std::uint64_t bytes) noexcept {
  if (bytes == 0 || address >> kAddressBits != 0) return;
  const std::uint64_t room = (std::uint64_t{1} << kAddressBits) - address;
  const std::uint64_t end = address + std::min(bytes, room) - 1;
  const std::uint64_t first = address >> kPageBits;
  const std::uint64_t last = end >> kPageBits;
  const auto low_half = static_cast<std::uint32_t>(address >> 32);
  const auto high_half = static_cast<std::uint32_t>(end >> 32);
  std::uint32_t known = lowest_half_.load(std::memory_order_relaxed);
  while (low_half < known && !lowest_half_.compare_exchange_weak(known, low_half, std::memory_order_relaxed)) {
  }
  known = highest_half_.load(std::memory_order_relaxed);
  while (high_half > known && !highest_half_.compare_exchange_weak(known, high_half, std::memory_order_relaxed)) {
  }
  for (std::uint64_t word = first / 64; word <= last / 64; ++word) {
    std::uint64_t bits = ~std::uint64_t{0};
    if (word == first / 64) bits &= ~std::uint64_t{0} << (first % 64);
    if (word == last / 64) bits &= ~std::uint64_t{0} >> (63 - last % 64);
    // A store is dear where other threads read, and most allocations lie in pages that are known.
    if ((bits_[word].load(std::memory_order_relaxed) & bits) != bits) {
      bits_[word].fetch_or(bits, std::memory_order_relaxed);
    }
  }
}

}  // namespace cudasched::predict
