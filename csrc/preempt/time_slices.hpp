// The hardware time slices of this process's contexts. While a context's slice lasts, the GPU runs no other process's
// context. When the slice is over and another context has work, the GPU stops the running kernels, at an instruction,
// and continues them later. libcuda gives each context 2,048 us. A best-effort process with 1 us gives way to any other
// process within a context switch, 0.13 ms, whatever kernels run. Alone on the GPU the process loses nothing. A latency
// process whose requests are longer than its slice is stopped for others' at each end of it.
//
// A copy engine gives a process's copies a slice of their own, 1,024 us by the kernel module, and interrupts them, too.
//
// Mechanism only: schedule/slice_length.hpp decides the length. The calls act on channel groups of this process alone,
// need no privilege, and go through the files that libcuda has opened for them. A call that sets a slice takes 0.3 ms,
// in the driver's locks, one that reads a slice 15 us. None is on the launch path.
//
// Anything unknown turns time slices off for the process, once: the program goes on as without them. The ticker's, and
// not thread-safe, but for watch(), which comes first, and state().
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "preempt/door.hpp"
#include "preempt/groups.hpp"

namespace cudasched::preempt {

// As `cudasched status` shows it (cudasched_time_slice_state).
enum class State : std::uint32_t {
  kUnused = 0,   // nothing of the process is best effort, or of latency work beside best effort
  kOn = 1,       // each of its contexts has the requested length
  kSetOff = 2,   // time_slice_us = off
  kMps = 3,      // the contexts of all MPS clients share one slice
  kShared = 4,   // the process has latency work, too: a slice covers all work of the process
  kUnseen = 5,   // libcuda's contexts were not seen: another driver, or CUDA was begun before cudasched
  kRefused = 6,  // the driver refuses the call or gives an unknown answer, or there are too many contexts
  kLost = 7,     // the program has closed the file that the driver had opened
  kTool = 8,     // a debugger, sanitizer or profiler is in the process and owns the driver
};

class TimeSlices {
 public:
  // Before the program's first driver call goes on. False: the contexts of this driver cannot be seen.
  bool watch(void* driver) noexcept { return watches_ = door_.watch(driver, groups_); }

  // A 4 KiB copy beside another process's waited 0.2 ms with the kernel module's length, 0.05 with this one, and 1 us
  // was no better (H200).
  static constexpr std::uint32_t kCopiesUs = 20;

  // Gives each context `us`, and its copies `copies_us`; 0: the lengths that they had, and where `us` is, both. Checks
  // the lengths now and then: libcuda sets its own 0.1 s after a context's creation.
  void keep(std::uint32_t us, std::int64_t now_ns, std::uint32_t copies_us = kCopiesUs) noexcept;

  // kUnused, kOn, kUnseen, kRefused or kLost; and the length that was set last, 0: none. The second is the ticker's.
  State state() const noexcept { return state_.load(std::memory_order_relaxed); }
  std::uint32_t us() const noexcept { return us_[0]; }
  // Where kOn: copies have their slice, too. The ticker's.
  bool interrupts_copies() const noexcept { return interrupts_copies_; }
  // For kRefused: the call and its result. The ticker's.
  const std::string& why() const noexcept { return why_; }
  // Calls that set a slice, ever.
  std::uint64_t calls() const noexcept { return calls_.load(std::memory_order_relaxed); }

  // The process's contexts.
  Groups& groups() noexcept { return groups_; }

  void reset_in_child() noexcept;

 private:
  // The time by which libcuda has set its own slice; the times between two checks before that, and later.
  static constexpr std::int64_t kSettlesNs = 1'000'000'000;
  static constexpr std::int64_t kLookNs = 20'000'000;
  static constexpr std::int64_t kLookLaterNs = 1'000'000'000;

  bool give(const Group& group, std::uint32_t us) noexcept;
  std::uint32_t control(const Group& group, std::uint32_t command, std::uint64_t& us) noexcept;
  bool refused(const Group& group, const char* call, std::uint32_t status) noexcept;
  void turn_off(State state, std::string_view why) noexcept;

  Door door_;
  Groups groups_;
  bool watches_ = false;
  std::atomic<State> state_{State::kUnused};
  std::atomic<std::uint64_t> calls_{0};
  // By Group::copies: the lengths that were set last, 0: none; and those without us, at first driver 580's. Where the
  // driver refuses to set those of copies, these keep theirs.
  std::array<std::uint32_t, 2> us_{};
  std::array<std::uint64_t, 2> own_us_{2'048, 1'024};
  bool sets_copies_ = true;
  bool interrupts_copies_ = false;
  std::uint64_t made_ = 0;
  std::int64_t made_ns_ = 0;  // when the newest group was first seen
  std::int64_t next_look_ns_ = 0;
  std::string why_;
};

}  // namespace cudasched::preempt
