// The counters of a client's process, in shared memory beside the client's slot. Any process may read them at any
// moment.
//
// Two copies and a version: the copy that the version names is whole, the other is being written. So a reader always
// finds the counts of one moment, also where the writer was stopped or killed in the middle.
//
// The slot's owner is the one writer, takes no lock and never makes a reader wait. Readers try again where the writer
// came twice during their read. Nothing here is on the launch path: the process counts in memory of its own
// (telemetry/counters.hpp), and its ticker publishes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cudasched/counts.h"

namespace cudasched::arbiter {

using Counts = cudasched_counts;

class alignas(64) SharedCounts {
 public:
  // `version` is the writer's own, at first above those of the slot's owners before: the shared one may be damaged.
  void publish(const Counts& counts, std::uint64_t& version) noexcept {
    const std::uint64_t next = version + 1;
    Words& to = copies_[next & 1];
    const auto* from = reinterpret_cast<const std::byte*>(&counts);
    for (std::size_t i = 0; i < kWords; ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, from + i * sizeof word, sizeof word);
      // Release, as the loads below are acquire: a reader that sees one of these sees the version before it, too.
      to[i].store(word, std::memory_order_release);
    }
    version_.store(next, std::memory_order_release);
    version = next;
  }

  // False: nothing was published, or the file changes under the reader for ever, as only a damaged one does.
  bool read(Counts& counts) const noexcept {
    auto* to = reinterpret_cast<std::byte*>(&counts);
    for (int tries = 0; tries < kTries; ++tries) {
      const std::uint64_t version = version_.load(std::memory_order_acquire);
      if (version == 0) return false;
      const Words& from = copies_[version & 1];
      for (std::size_t i = 0; i < kWords; ++i) {
        const std::uint64_t word = from[i].load(std::memory_order_acquire);
        std::memcpy(to + i * sizeof word, &word, sizeof word);
      }
      if (version_.load(std::memory_order_relaxed) == version) return true;
    }
    return false;
  }

  // The process of the slot, by the number Counts::process; a process's clients share one record. 0: not known yet.
  std::uint64_t process() const noexcept { return process_.load(std::memory_order_relaxed); }
  void set_process(std::uint64_t process) noexcept {
    if (process_.load(std::memory_order_relaxed) != process) process_.store(process, std::memory_order_relaxed);
  }

  // The slot has a new owner, which has published nothing.
  void clear() noexcept {
    process_.store(0, std::memory_order_relaxed);
    version_.store(0, std::memory_order_release);
  }

 private:
  static constexpr int kTries = 100;
  static_assert(sizeof(Counts) % sizeof(std::uint64_t) == 0);
  static constexpr std::size_t kWords = sizeof(Counts) / sizeof(std::uint64_t);
  using Words = std::array<std::atomic<std::uint64_t>, kWords>;

  std::atomic<std::uint64_t> version_;
  std::atomic<std::uint64_t> process_;
  std::array<Words, 2> copies_;
};

}  // namespace cudasched::arbiter
