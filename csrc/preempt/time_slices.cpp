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

// libcuda's own slice, where none was seen.
constexpr std::uint64_t kUsualUs = 2048;

// Of a status: ioctl itself failed, with this errno.
constexpr std::uint32_t kErrno = 0x8000'0000U;

}  // namespace

void TimeSlices::keep(std::uint32_t us, Stop stop, std::int64_t now) noexcept {
  const State state = this->state();
  if (state == State::kRefused || state == State::kLost) return;
  const std::uint32_t before = us_.load(std::memory_order_relaxed);
  if (us == 0 && before == 0) {
    state_.store(State::kUnused, std::memory_order_relaxed);
    return;
  }
  if (const std::uint64_t made = groups_.made(); made != made_) {
    made_ = made;
    made_ns_ = now;
    next_look_ns_ = now;
  }
  if (us == 0) stop = Stop::kAtInstruction;
  const bool settled = now - made_ns_ >= kSettlesNs;
  const bool stops = stop_refused_ || (stop == this->stop() && (stopped_ == made_ || stop == Stop::kAtInstruction));
  if (us == before && (stops || !settled) && now < next_look_ns_) return;
  next_look_ns_ = now + (now - made_ns_ < kSettlesNs ? kLookNs : kLookLaterNs);

  if (groups_.overflows() > 0) {
    static_assert(Groups::kMost == 256);
    turn_off(State::kRefused, "it has more than 256 contexts");
    return;
  }
  std::array<Group, Groups::kMost> groups;
  const std::size_t count = groups_.read(groups);
  if (us != 0 && (!watches_ || count == 0)) {
    state_.store(State::kUnseen, std::memory_order_relaxed);
    return;
  }
  for (const Group& group : std::span(groups).first(count)) {
    if (!give(group, us != 0 ? us : static_cast<std::uint32_t>(own_us_ != 0 ? own_us_ : kUsualUs))) return;
  }
  if (!stops && (settled || us == 0)) have_stop(stop, std::span(groups).first(count));
  us_.store(us, std::memory_order_relaxed);
  state_.store(us != 0 ? State::kOn : State::kUnused, std::memory_order_relaxed);
}

// False: not possible, and time slices are off.
bool TimeSlices::give(const Group& group, std::uint32_t us) noexcept {
  if (OpenFile::of(group.file.descriptor) != group.file) {
    turn_off(State::kLost, "");
    return false;
  }
  wire::TimeSlice slice{};
  if (const std::uint32_t status = control(group, group.handle, wire::kGetTimeSlice, slice); status != 0) {
    return refused(group, "GET_TIMESLICE", status);
  }
  if (slice.us == us) return true;
  if (slice.us != us_.load(std::memory_order_relaxed)) own_us_ = slice.us;
  slice.us = us;
  calls_.fetch_add(1, std::memory_order_relaxed);
  if (const std::uint32_t status = control(group, group.handle, wire::kSetTimeSlice, slice); status != 0) {
    return refused(group, "SET_TIMESLICE", status);
  }
  return true;
}

// A driver that refuses stops at instructions, as libcuda has it: slower for best effort, and never asked again.
void TimeSlices::have_stop(Stop stop, std::span<const Group> groups) noexcept {
  for (const Group& group : groups) {
    wire::Preemption wanted{.flags = wire::kSetsCompute,
                            .channel = group.channel,
                            .graphics = 0,
                            .compute = static_cast<std::uint32_t>(stop),
                            .route_flags = 0,
                            .padding = 0,
                            .route = 0};
    const bool seen = group.subdevice != 0 && group.channel != 0;
    if (seen && control(group, group.subdevice, wire::kSetPreemption, wanted) == 0) continue;
    if (stop == Stop::kAtInstruction || !lives(group)) continue;
    stop_refused_ = true;
    return have_stop(Stop::kAtInstruction, groups);
  }
  stop_.store(stop, std::memory_order_relaxed);
  stopped_ = made_;
}

// The status of the kernel module; 0: done.
template <typename Parameters>
std::uint32_t TimeSlices::control(const Group& group, std::uint32_t object, std::uint32_t command,
                                  Parameters& parameters) noexcept {
  wire::Control call{.client = group.client,
                     .object = object,
                     .command = command,
                     .flags = 0,
                     .parameters = reinterpret_cast<std::uintptr_t>(&parameters),
                     .parameters_size = sizeof parameters,
                     .status = wire::kNoStatus};
  const int result =
      door_.call(group.file.descriptor, wire::request(wire::kControl, sizeof call), static_cast<void*>(&call));
  return result < 0 ? kErrno | static_cast<std::uint32_t>(errno) : call.status;
}

// False: its context was destroyed meanwhile.
bool TimeSlices::lives(const Group& asked) const noexcept {
  std::array<Group, Groups::kMost> groups;
  const auto living = std::span(groups).first(groups_.read(groups));
  const auto is_it = [&](const Group& group) { return group.client == asked.client && group.handle == asked.handle; };
  return std::any_of(living.begin(), living.end(), is_it);
}

// True: the group is gone.
bool TimeSlices::refused(const Group& asked, const char* call, std::uint32_t status) noexcept {
  if (!lives(asked)) return true;
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), (status & kErrno) != 0 ? "%s failed with errno %u" : "%s gave status 0x%x",
                call, status & ~kErrno);
  turn_off(State::kRefused, text.data());
  return false;
}

void TimeSlices::turn_off(State state, std::string_view why) noexcept {
  us_.store(0, std::memory_order_relaxed);
  state_.store(state, std::memory_order_relaxed);
  try {
    why_ = why;
  } catch (const std::exception&) {  // no memory for the text
  }
}

void TimeSlices::reset_in_child() noexcept {
  groups_.reset_in_child();
  state_.store(State::kUnused, std::memory_order_relaxed);
  us_.store(0, std::memory_order_relaxed);
  stop_.store(Stop::kAtInstruction, std::memory_order_relaxed);
  made_ = stopped_ = 0;
  next_look_ns_ = 0;
}

}  // namespace cudasched::preempt
