// Moves pageable memory (pageable.hpp) of a best-effort process to the host's and back, whole chunks of it, while the
// process is stopped ("parked"). A latency client whose allocation fails asks for that (memory.hpp), or a controller.
//
//   host memory is pinned ahead, as much as the setting `park` allows, and the program runs on
//   the barrier closes (driver/barrier.hpp): the launcher and the program's calls wait, launches go into the ring
//   the GPU becomes idle; where a call has waited for that for a second, nothing moves, and the program goes on
//   chunks are copied, unmapped and given back; later created, mapped and copied again
//   the barrier opens, once all chunks are back
//
// Memory comes back once no client asks, and the GPU has had room for all of it for a while. A process moves nothing
// that has latency work, several contexts or devices, a capture, managed memory, memory that others may know, or no
// launch queue. Where the host has no room, all stays where it is.
//
// Under the setting `memory_turn_ms`, memory moves for best-effort clients, too, which take turns
// (schedule/memory_turns.hpp). An allocation that fails then waits for its client's turn (MemoryTurn).
//
// Threads: the giver's (memory.cpp), of the one GPU; drop() is the program's, and the rest any.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "memory/parking.hpp"

namespace cudasched::runtime {

class Device;
class Pageable;

class Pager {
 public:
  explicit Pager(Pageable& pageable) noexcept : pageable_(pageable) {}

  // The host memory, in bytes, to which chunks may move.
  void configure(std::uint64_t most) noexcept { most_.store(memory::Arena::rounded(most)); }
  // How long a turn lasts; 0: there are none.
  void take_turns(std::int64_t turn_ns) noexcept { turn_ns_.store(turn_ns); }
  bool has_turns() const noexcept { return turn_ns_.load(std::memory_order_relaxed) != 0; }

  // Others hear that this client takes turns, before the giver's first look.
  void join_turns(Device& device) noexcept;

  // Others hear of the first memory that can move, before the giver's next look. Not while the giver moves some.
  void say_movable(Device& device) noexcept;

  // As of the giver's last look.
  std::uint64_t movable() const noexcept { return movable_.load(std::memory_order_relaxed); }
  std::uint64_t away() const noexcept { return away_.load(std::memory_order_relaxed); }

  // Moves at least so many bytes away, or all. False: none moved; the log says why, once for each reason.
  bool park(Device& device, std::uint64_t least) noexcept;
  // Looks what can move, carries out what a controller wants, moves memory back where that is due, and pins ahead.
  // `asked`: a client asks for memory.
  void tend(Device& device, bool asked) noexcept;
  // A move has failed within the last second: the next one waits.
  bool rests() const noexcept;
  // A thread waits for a turn, and may hold its allocator's lock meanwhile.
  bool waits() const noexcept { return wanted_.load(std::memory_order_relaxed) != 0; }
  // A controller wants all memory away until it says otherwise.
  void want_away(bool away) noexcept {
    if (!away) full_ns_.store(0);  // at once
    wanted_away_.store(away);
  }

  // The primary context is about to be reset. True: memory was away, and all chunks are gone.
  bool drop() noexcept;
  void reset_in_child() noexcept;

 private:
  friend class MemoryTurn;
  struct Seen;

  bool takes_turns(Device& device) const noexcept;
  // What calls wait for. While memory is away, a thread that wants more may wait at the barrier and cannot give up.
  std::uint64_t missing() const noexcept { return away() != 0 ? away() : wanted_.load(); }
  void see(Device& device, bool asked, Seen& seen) noexcept;
  bool follow_turns(Device& device, bool asked) noexcept;
  void begin_turn() noexcept;
  void publish_turn(Device& device) noexcept;
  std::string why_not(const Device& device) const;
  std::string move_away(Device& device, std::uint64_t least);
  std::string stop_program();
  std::string pin(std::uint64_t more);
  std::string pin_in_turn(Device& device, std::uint64_t more);
  void pin_ahead();
  void move_back(Device& device, bool waits) noexcept;
  bool has_room() noexcept;
  void note() noexcept;
  void publish(Device& device, std::uint64_t movable) noexcept;

  Pageable& pageable_;
  std::mutex moving_;
  memory::Parking* parking_ = nullptr;  // never destroyed, as the pool
  std::atomic<std::uint64_t> most_{0};
  bool pins_ahead_ = true;
  bool pin_failed_ = false;  // under moving_: no allocation waits for its end again
  bool busy_ = false;        // under moving_: the last move failed as the program could not be stopped
  std::atomic<std::uint64_t> movable_{0};
  std::atomic<std::uint64_t> away_{0};
  std::atomic<bool> wanted_away_{false};
  std::atomic<std::int64_t> full_ns_{0};  // the last look at which memory could not come back
  std::int64_t refused_ns_ = 0;           // under moving_: the last move that failed
  std::atomic<std::int64_t> turn_ns_{0};
  std::mutex waits_;                      // of a thread that waits for a turn: others wait behind it
  std::atomic<std::uint64_t> wanted_{0};  // bytes of the allocation that waits
  std::atomic<bool> served_{false};       // such an allocation has had its room: a turn begins
  std::atomic<bool> takes_{false};        // and is being made
  bool returns_ = false;                  // the giver's: memory is on its way back
  std::int64_t since_ns_ = 0;             // the giver's: since when calls wait for memory; 0: none does
  std::int64_t turn_until_ns_ = 1;        // the giver's
  std::string said_;
};

// A best-effort client's allocation that failed for lack of memory, and waits until others have moved theirs away.
class MemoryTurn {
 public:
  MemoryTurn(int device, std::uint64_t bytes) noexcept;
  ~MemoryTurn();
  MemoryTurn(const MemoryTurn&) = delete;
  MemoryTurn& operator=(const MemoryTurn&) = delete;

  // Waits until there is room: the allocation is to be tried again. False: there are no turns, no other client takes
  // any, or the others' memory has not been enough, or none of it moved, for `give_back_ms` and two seconds. Turns of
  // others, latency work that asks, and the return of the program's own memory do not count in these.
  bool next() noexcept;

 private:
  void want(std::uint64_t bytes) noexcept;

  Device* device_ = nullptr;
  std::unique_lock<std::mutex> waits_;
  bool tried_ = false;
  std::int64_t hopeless_ns_ = 0;  // how long the wait has had no reason that passes
  std::uint64_t free_ = 0;        // of the GPU, at the last look at which it had one
};

}  // namespace cudasched::runtime
