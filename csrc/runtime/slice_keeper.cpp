#include "runtime/slice_keeper.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "runtime/engine.hpp"
#include "schedule/slice_length.hpp"

namespace cudasched::runtime {

using preempt::State;

namespace {

constexpr std::int64_t kUsualSliceNs = 2'048'000;  // as libcuda sets it, where there is no MPS

// The longest kernel or graph of the process so far.
std::int64_t longest_ns(Engine& engine) noexcept {
  std::int64_t longest = 0;
  engine.for_each_device([&](Device& device) { longest = std::max(longest, device.gate.longest_ns()); });
  return longest;
}

}  // namespace

void SliceKeeper::watch(void* real_driver, const Settings& settings, bool tool) noexcept {
  setting_ = settings.time_slice_us;
  tool_ = tool;
  if (setting_ != 0U && !tool_) slices_.watch(real_driver);
}

// 0: libcuda's own; state_ says why, where best effort is there.
std::uint32_t SliceKeeper::wanted(Engine& engine, std::int64_t now) noexcept {
  const bool slices_on = best_effort_ && state_ == State::kOn;  // as of the last tick
  best_effort_ = false;
  bool latency = false;
  bool mps = false;
  bool beside_best_effort = false;
  bool beside_latency = false;
  std::uint32_t us = 0;
  engine.for_each_device([&](Device& device) {
    mps = mps || device.under_mps();
    if (device.registered(Class::kLatency)) {
      latency = true;
      beside_best_effort = beside_best_effort || device.beside(Class::kBestEffort, now);
      beside_latency = beside_latency || device.beside(Class::kLatency, now);
    }
    if (!device.registered(Class::kBestEffort)) return;
    best_effort_ = true;
    us = std::max(us, device.slice_us(now));
    // Where requests are announced, the gate has the GPU clear when they come.
    device.gate.step_aside({.interrupted = slices_on && !setting_ && !device.announced(now),
                            .copies = slices_.interrupts_copies(),
                            .pauses = device.pauses(now)});
  });
  if (!best_effort_) {
    const bool longer = beside_best_effort && !beside_latency && setting_ != 0U && !tool_ && !mps;
    us = schedule::SliceLength::kLatencyUs;
    state_ = longer ? State::kOn : State::kUnused;
  } else {
    state_ = setting_ == 0U ? State::kSetOff
             : tool_        ? State::kTool
             : mps          ? State::kMps
             : latency      ? State::kShared
                            : State::kOn;
  }
  return state_ == State::kOn ? us : 0;
}

void SliceKeeper::tick(Engine& engine, std::int64_t now) noexcept {
  const std::uint32_t us = wanted(engine, now);
  const std::uint32_t before = slices_.us();
  slices_.keep(us, now, best_effort_ ? preempt::TimeSlices::kCopiesUs : 0);
  if (us != 0) state_ = best_effort_ || slices_.state() == State::kOn ? slices_.state() : State::kUnused;
  try {
    if (us != 0 && state_ == State::kOn && slices_.us() != before) {
      log::info("the time slice of this program's contexts is " + std::to_string(us) +
                " us: kernels of other programs interrupt its kernels after it");
    }
    if (state_ == State::kRefused && !std::exchange(said_, true)) {
      log::warning("this program's time slice cannot be set (" + slices_.why() +
                   "): its kernels are not interrupted for others, and the gate alone holds it back");
    }
    if (state_ == State::kLost && !std::exchange(said_, true)) {
      log::warning(
          "this program has closed files of the NVIDIA driver: its kernels are not interrupted for others, and the "
          "gate alone holds it back");
    }
    if (state_ == State::kMps && longest_ns(engine) > kUsualSliceNs && !std::exchange(said_, true)) {
      log::warning("kernels of this program last for " + std::to_string(longest_ns(engine) / kNsPerMs) +
                   " ms, and under MPS nothing interrupts them for requests of others: run it without --mps");
    }
  } catch (const std::exception&) {  // no memory for a message
  }
  const std::uint32_t told_us = state_ == State::kOn ? slices_.us() : 0;
  engine.for_each_device([&](Device& device) {
    for (int i = 0; i < kClassCount; ++i) {
      const int index = device.slot(static_cast<Class>(i));
      if (index < 0) continue;
      arbiter::Slot& slot = device.table().slot(index);
      const bool tells = static_cast<Class>(i) == (best_effort_ ? Class::kBestEffort : Class::kLatency);
      slot.time_slice_us.store(tells ? told_us : 0, std::memory_order_relaxed);
      slot.time_slice_state.store(static_cast<std::uint32_t>(tells ? state_ : State::kUnused),
                                  std::memory_order_relaxed);
    }
  });
}

void SliceKeeper::reset_in_child() noexcept {
  slices_.reset_in_child();
  state_ = State::kUnused;
}

}  // namespace cudasched::runtime
