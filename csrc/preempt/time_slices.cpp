#include "preempt/time_slices.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <span>

#include "preempt/wire.hpp"

namespace cudasched::preempt {
namespace {

// Of a status: ioctl itself failed, with this errno.
constexpr std::uint32_t kErrno = 0x8000'0000U;

}  // namespace

void TimeSlices::keep(std::uint32_t us, std::int64_t now, std::uint32_t copies_us) noexcept {
  const State state = this->state();
  if (state == State::kRefused || state == State::kLost) return;
  const std::array<std::uint32_t, 2> wanted{us, us == 0 ? 0 : copies_us};
  if (us == 0 && us_[0] == 0) {
    state_.store(State::kUnused, std::memory_order_relaxed);
    return;
  }
  if (const std::uint64_t made = groups_.made(); made != made_) {
    made_ = made;
    made_ns_ = now;
    next_look_ns_ = now;
  }
  if (wanted == us_ && now < next_look_ns_) return;
  next_look_ns_ = now + (now - made_ns_ < kSettlesNs ? kLookNs : kLookLaterNs);

  if (groups_.overflows() > 0) {
    static_assert(Groups::kMostContexts == 256);
    turn_off(State::kRefused, "it has more than 256 contexts");
    return;
  }
  std::array<Group, Groups::kMost> groups;
  const auto all = std::span(groups).first(groups_.read(groups));
  if (us != 0 && (!watches_ || std::ranges::all_of(all, &Group::copies))) {
    state_.store(State::kUnseen, std::memory_order_relaxed);
    return;
  }
  for (const Group& group : all) {
    if (!give(group, wanted[group.copies ? 1 : 0])) return;
  }
  interrupts_copies_ = sets_copies_ && wanted[1] != 0 && std::ranges::any_of(all, &Group::copies);
  us_ = wanted;
  state_.store(us != 0 ? State::kOn : State::kUnused, std::memory_order_relaxed);
}

// 0: the length without us. False: not possible, and time slices are off.
bool TimeSlices::give(const Group& group, std::uint32_t us) noexcept {
  const std::size_t kind = group.copies ? 1 : 0;
  if ((group.copies && !sets_copies_) || (us == 0 && us_[kind] == 0)) return true;
  if (OpenFile::of(group.file.descriptor) != group.file) {
    turn_off(State::kLost, "");
    return false;
  }
  std::uint64_t has = 0;
  if (const std::uint32_t status = control(group, wire::kGetTimeSlice, has); status != 0) {
    return refused(group, "GET_TIMESLICE", status);
  }
  std::uint64_t wanted = us != 0 ? us : own_us_[kind];
  if (has == wanted) return true;
  if (has != us_[kind]) own_us_[kind] = has;
  calls_.fetch_add(1, std::memory_order_relaxed);
  if (const std::uint32_t status = control(group, wire::kSetTimeSlice, wanted); status != 0) {
    return refused(group, "SET_TIMESLICE", status);
  }
  return true;
}

// The status of the kernel module; 0: done.
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
  if (result < 0) return kErrno | static_cast<std::uint32_t>(errno);
  us = slice.us;
  return call.status;
}

// True: the group is gone, because its context was destroyed meanwhile, or copies.
bool TimeSlices::refused(const Group& asked, const char* call, std::uint32_t status) noexcept {
  std::array<Group, Groups::kMost> groups;
  const auto living = std::span(groups).first(groups_.read(groups));
  const auto is_it = [&](const Group& group) { return group.client == asked.client && group.handle == asked.handle; };
  if (std::none_of(living.begin(), living.end(), is_it)) return true;
  if (asked.copies) {
    sets_copies_ = false;
    return true;
  }
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), (status & kErrno) != 0 ? "%s failed with errno %u" : "%s gave status 0x%x",
                call, status & ~kErrno);
  turn_off(State::kRefused, text.data());
  return false;
}

void TimeSlices::turn_off(State state, std::string_view why) noexcept {
  us_ = {};
  state_.store(state, std::memory_order_relaxed);
  try {
    why_ = why;
  } catch (const std::exception&) {  // no memory for the text
  }
}

void TimeSlices::reset_in_child() noexcept {
  groups_.reset_in_child();
  state_.store(State::kUnused, std::memory_order_relaxed);
  us_ = {};
  made_ = 0;
  next_look_ns_ = 0;
}

}  // namespace cudasched::preempt
