#include "memory/arena.hpp"

#include <sys/mman.h>

#include "driver/driver.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace cudasched::memory {
namespace {

constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// Kernels before 5.14 fault the pages in as the driver pins them.
bool fill(std::byte* at, Bytes bytes) noexcept {
  if (mprotect(at, bytes, PROT_READ | PROT_WRITE) != 0) return false;
  madvise(at, bytes, MADV_HUGEPAGE);
  madvise(at, bytes, MADV_DONTFORK);
  madvise(at, bytes, MADV_POPULATE_WRITE);
  auto* const pin = driver::table().cuMemHostRegister;
  return pin != nullptr && pin(at, bytes, 0) == CUDA_SUCCESS;
}

}  // namespace

bool Arena::grow(Bytes bytes) noexcept {
  if (bytes > most_) return false;
  if (begin_ == nullptr) {
    void* const made = mmap(nullptr, most_, PROT_NONE, kFlags, -1, 0);
    if (made == MAP_FAILED) return false;
    begin_ = static_cast<std::byte*>(made);
  }
  while (bytes_ < bytes) {
    if (!fill(at(bytes_), kSegmentBytes)) {
      mmap(at(bytes_), kSegmentBytes, PROT_NONE, kFlags | MAP_FIXED, -1, 0);
      return false;
    }
    bytes_ += kSegmentBytes;
  }
  return true;
}

}  // namespace cudasched::memory
