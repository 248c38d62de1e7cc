#include "preempt/time_slices.hpp"

#include <array>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <span>

#include "preempt/wire.hpp"

namespace cudasched::preempt {
namespace {

// libcuda's own, where it was never seen.
constexpr std::uint64_t kUsualUs = 2048;

}  // namespace

bool TimeSlices::keep(std::uint32_t us, std::int64_t now) noexcept {
  const State state = this->state();
  if (state == State::kRefused || state == State::kLost) return false;
  const std::uint32_t before = us_.load(std::memory_order_relaxed);
  if (us == 0 && before == 0) {
    state_.store(State::kUnused, std::memory_order_relaxed);
    return false;
  }
  if (const std::uint64_t made = groups_.made(); made != made_) {
    made_ = made;
    made_ns_ = now;
    next_look_ns_ = now;
  }
  if (us == before && now < next_look_ns_) return false;
  next_look_ns_ = now + (now - made_ns_ < kSettlesNs ? kLookNs : kLookLaterNs);

  std::array<Group, Groups::kMost> groups;
  const std::size_t count = groups_.read(groups);
  if (us != 0 && (!watches_ || count == 0)) {
    state_.store(State::kUnseen, std::memory_order_relaxed);
    return false;
  }
  for (const Group& group : std::span(groups).first(count)) {
    if (!give(group, us != 0 ? us : static_cast<std::uint32_t>(own_us_ != 0 ? own_us_ : kUsualUs))) return true;
  }
  us_.store(us, std::memory_order_relaxed);
  state_.store(us != 0 ? State::kOn : State::kUnused, std::memory_order_relaxed);
  return true;
}

// False: it cannot be done, and is off.
bool TimeSlices::give(const Group& group, std::uint32_t us) noexcept {
  if (OpenFile::of(group.file.descriptor) != group.file) {
    turn_off(group, State::kLost, "", 0);
    return false;
  }
  std::uint64_t has = 0;
  if (const std::uint32_t status = control(group, wire::kGetTimeSlice, has); status != 0) {
    turn_off(group, State::kRefused, "GET_TIMESLICE", status);
    return state() != State::kRefused;
  }
  if (has == us) return true;
  if (group.set_us != has) own_us_ = has;
  std::uint64_t wanted = us;
  calls_.fetch_add(1, std::memory_order_relaxed);
  if (const std::uint32_t status = control(group, wire::kSetTimeSlice, wanted); status != 0) {
    turn_off(group, State::kRefused, "SET_TIMESLICE", status);
    return state() != State::kRefused;
  }
  groups_.set(group.client, group.handle, us);
  return true;
}

// The status of the kernel module; 0: done. An errno comes with its upper bit set.
std::uint32_t TimeSlices::control(const Group& group, std::uint32_t command, std::uint64_t& us) noexcept {
  wire::TimeSlice slice{us};
  wire::Control call{.client = group.client,
                     .object = group.handle,
                     .command = command,
                     .flags = 0,
                     .parameters = reinterpret_cast<std::uintptr_t>(&slice),
                     .parameters_size = sizeof slice,
                     .status = wire::kNoStatus};
  const int result =
      door_.call(group.file.descriptor, wire::request(wire::kControl, sizeof call), static_cast<void*>(&call));
  if (result < 0) return 0x8000'0000U | static_cast<std::uint32_t>(errno);
  us = slice.us;
  return call.status;
}

// Unless the group is gone: its context was destroyed meanwhile.
void TimeSlices::turn_off(const Group& gone, State why, const char* call, std::uint32_t status) noexcept {
  std::array<Group, Groups::kMost> groups;
  bool lives = false;
  for (const Group& group : std::span(groups).first(groups_.read(groups))) {
    lives = lives || (group.client == gone.client && group.handle == gone.handle);
  }
  if (!lives) return;
  us_.store(0, std::memory_order_relaxed);
  state_.store(why, std::memory_order_relaxed);
  try {
    std::array<char, 96> text{};
    const bool failed = (status & 0x8000'0000U) != 0;
    std::snprintf(text.data(), text.size(), failed ? "%s failed with errno %u" : "%s was answered with status 0x%x",
                  call, status & 0x7FFF'FFFFU);
    why_ = text.data();
  } catch (const std::exception&) {  // no memory for it
  }
}

void TimeSlices::reset_in_child() noexcept {
  groups_.reset_in_child();
  state_.store(State::kUnused, std::memory_order_relaxed);
  us_.store(0, std::memory_order_relaxed);
  made_ = 0;
  next_look_ns_ = 0;
}

}  // namespace cudasched::preempt
