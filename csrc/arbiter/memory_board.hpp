// The GPU memory that clients hold, and the words by which one client asks the others to give cached memory back
// (schedule/give_back.hpp decides, runtime/memory acts). A block of its own of the shared table.
//
// As in the slots, each word has one writer, its slot's owner, or is a bitmap of slots or a counter that only grows. So
// after a process is killed at any instruction, its slot's lock tells all that it left wrong.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace cudasched::arbiter {

struct alignas(64) SlotMemory {
  std::atomic<std::uint64_t> held_bytes;   // of the client; also memory of its process in a class without a client
  std::atomic<std::uint64_t> peak_bytes;   // of its process on this GPU
  std::atomic<std::uint64_t> limit_bytes;  // of its process; 0: none
  // Of a client that asks, while its bit is in MemoryBoard::requests:
  std::atomic<std::uint64_t> request;          // its number; written before the bit is set
  std::atomic<std::uint64_t> request_bytes;    // the memory asked for
  std::atomic<std::int64_t> request_until_ns;  // when the request ends, CLOCK_MONOTONIC
  // Of a client that is asked:
  std::atomic<std::uint64_t> answered;     // the last request answered; all before that are answered, too
  std::atomic<std::uint64_t> given_bytes;  // ever
  std::atomic<std::uint64_t> refusals;     // requests answered with no
  // Of the process's pools, with one of its clients:
  std::atomic<std::uint64_t> pool_reserved_bytes;
  std::atomic<std::uint64_t> pool_allocated_bytes;
  std::atomic<std::uint64_t> pool_largest_free_bytes;
  std::atomic<std::uint64_t> movable_bytes;  // of a client that is asked: that it can move to the host's memory,
  std::atomic<std::uint64_t> away_bytes;     // and that are there
  std::atomic<std::uint32_t> gives;          // 1: it has a cache or a pool, and a thread that can empty that
  std::atomic<std::uint32_t> request_moves;  // of a client that asks: 1: memory is to be moved, not only cached memory
  // Of a client that takes turns with its memory (schedule/memory_turns.hpp):
  std::atomic<std::uint64_t> lacks_bytes;  // that it waits for
  std::atomic<std::int64_t> lacks_since_ns;
  std::atomic<std::int64_t> turn_until_ns;  // 0: it takes none

  // The slot has a new owner.
  void clear() noexcept {
    for (auto* const word : {&held_bytes, &peak_bytes, &limit_bytes, &request, &request_bytes, &answered, &given_bytes,
                             &refusals, &pool_reserved_bytes, &pool_allocated_bytes, &pool_largest_free_bytes,
                             &movable_bytes, &away_bytes, &lacks_bytes}) {
      word->store(0, std::memory_order_relaxed);
    }
    request_until_ns.store(0, std::memory_order_relaxed);
    lacks_since_ns.store(0, std::memory_order_relaxed);
    turn_until_ns.store(0, std::memory_order_relaxed);
    gives.store(0, std::memory_order_relaxed);
    request_moves.store(0, std::memory_order_relaxed);
  }
};

struct alignas(64) MemoryBoard {
  std::atomic<std::uint64_t> requests;  // slots that ask now
  std::atomic<std::uint64_t> made;      // requests, ever: where their numbers come from
  std::atomic<std::uint32_t> sequence;  // futex: changes with each request, answer and end of a request
  std::array<SlotMemory, 64> slots;
};

}  // namespace cudasched::arbiter
