// Errors of deferred calls, on their way to the program. A non-sticky error is for the thread that pushed the call and
// is handed over once, at its next call. A sticky one is for the next call of any thread, as in CUDA. The driver itself
// repeats a sticky error, so nothing more is deferred (broken()). While there is no error, looking costs one load.
//
// Any thread may put and take; nothing locks.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "queue/operation.hpp"

namespace cudasched::queue {

class Mailbox {
 public:
  static constexpr std::size_t kPlaces = 64;

  // `thread` is a number other than 0. The first error of a thread stays until taken. Where no place is free, the error
  // is for the next call of any thread.
  void put(unsigned thread, CUresult status) noexcept {
    if (is_sticky(status) || !put_for(thread, status)) {
      std::uint32_t none = 0;
      for_any_.compare_exchange_strong(none, static_cast<std::uint32_t>(status));
    }
    if (is_sticky(status)) broken_.store(true, std::memory_order_relaxed);
    filled_.store(true);  // sequentially consistent, as is the store of take_filled
  }

  // A sticky error came: every call fails until the context is gone.
  bool broken() const noexcept { return broken_.load(std::memory_order_relaxed); }

  // The context is gone, and its sticky error with it.
  void mend() noexcept {
    broken_.store(false, std::memory_order_relaxed);
    std::uint32_t status = for_any_.load();
    if (is_sticky(static_cast<CUresult>(status))) for_any_.compare_exchange_strong(status, 0);
  }

  // Would take() give one?
  bool holds(unsigned thread) const noexcept {
    if (!filled_.load(std::memory_order_relaxed)) return false;
    if (for_any_.load() != 0) return true;
    return std::any_of(places_.begin(), places_.end(), [&](const std::atomic<std::uint64_t>& place) {
      return static_cast<unsigned>(place.load() >> 32) == thread;
    });
  }

  CUresult take(unsigned thread) noexcept {
    if (!filled_.load(std::memory_order_relaxed)) return CUDA_SUCCESS;
    return take_filled(thread);
  }

 private:
  bool put_for(unsigned thread, CUresult status) noexcept {
    for (auto& place : places_) {
      if (static_cast<unsigned>(place.load() >> 32) == thread) return true;
    }
    for (auto& place : places_) {
      std::uint64_t empty = 0;
      if (place.compare_exchange_strong(empty, std::uint64_t{thread} << 32 | static_cast<std::uint32_t>(status))) {
        return true;
      }
    }
    return false;
  }

  CUresult take_filled(unsigned thread) noexcept {
    // Lowered first: an error that is put meanwhile raises the flag again.
    filled_.store(false, std::memory_order_seq_cst);
    CUresult found = static_cast<CUresult>(for_any_.exchange(0));
    bool more = false;
    for (auto& place : places_) {
      std::uint64_t word = place.load();
      if (word == 0) continue;
      if (found == CUDA_SUCCESS && static_cast<unsigned>(word >> 32) == thread &&
          place.compare_exchange_strong(word, 0)) {
        found = static_cast<CUresult>(static_cast<std::uint32_t>(word));
      } else {
        more = true;
      }
    }
    if (more) filled_.store(true, std::memory_order_release);
    return found;
  }

  std::atomic<bool> filled_{false};
  std::atomic<bool> broken_{false};
  std::atomic<std::uint32_t> for_any_{0};
  std::array<std::atomic<std::uint64_t>, kPlaces> places_{};  // thread, status
};

}  // namespace cudasched::queue
