#include "driver/registry.hpp"

#include <exception>

#include "driver/driver.hpp"

namespace cudasched::driver {
namespace {

// The word that holds a device's ordinal in its lower half, + 1, and flags in its upper one.
constexpr std::uint64_t kBlocking = std::uint64_t{1} << 32;
constexpr std::uint64_t kShared = std::uint64_t{1} << 32;
constexpr std::uint64_t kCaptured = std::uint64_t{1} << 33;
// Beside a graph's number of nodes.
constexpr std::uint64_t kPlain = std::uint64_t{1} << 32;
constexpr std::uint64_t kLaunched = std::uint64_t{1} << 33;

constexpr std::uint64_t device_word(int device) noexcept { return static_cast<std::uint32_t>(device + 1); }
constexpr int device_in(std::uint64_t word) noexcept { return static_cast<int>(static_cast<std::uint32_t>(word)) - 1; }
CUcontext context_in(std::uint64_t word) noexcept { return reinterpret_cast<CUcontext>(word); }

// A context and a device in one word: addresses of a process have 57 bits at most, of which the highest is 0.
constexpr int kDeviceShift = 56;
std::uint64_t place_word(CUcontext context, int device) noexcept {
  return handle_word(context) | (device_word(device) & 0xff) << kDeviceShift;
}
CUcontext context_at(std::uint64_t place) noexcept {
  return context_in(place & ((std::uint64_t{1} << kDeviceShift) - 1));
}
constexpr int device_at(std::uint64_t place) noexcept { return static_cast<int>(place >> kDeviceShift) - 1; }

// Null without one.
CUcontext current_context() noexcept {
  CUcontext context = nullptr;
  return table().cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : nullptr;
}

EventFacts event_facts(const HandleTable<2>::Words& words) noexcept {
  return {(words[1] & kShared) != 0, (words[1] & kCaptured) != 0, device_in(words[1]), context_in(words[0])};
}

}  // namespace

int current_device() noexcept {
  CUdevice device = -1;
  return table().cuCtxGetDevice(&device) == CUDA_SUCCESS ? device : -1;
}

int device_of(CUcontext context) noexcept {
  const CurrentContext now(context);
  return now.ok() ? current_device() : -1;
}

// ---- streams

bool Registry::find(CUstream stream, StreamFacts& facts) const noexcept {
  HandleTable<2>::Words words{};
  if (!streams_.find(handle_word(stream), words)) return false;
  facts = {(words[1] & kBlocking) != 0, device_in(words[1]), context_in(words[0])};
  return true;
}

bool Registry::look_up(CUstream stream, StreamFacts& facts) noexcept {
  if (find(stream, facts)) return true;
  // Asking for the flags of a stream that captures would invalidate the capture.
  if (is_capturing(stream)) return false;
  unsigned flags = 0;
  if (table().cuStreamGetFlags(stream, &flags) != CUDA_SUCCESS) return false;
  CUcontext context = nullptr;
  if (table().cuStreamGetCtx_v1 == nullptr || table().cuStreamGetCtx_v1(stream, &context) != CUDA_SUCCESS) {
    context = nullptr;
  }
  // A green context may be current to one thread at a time: it is not made current here, and its streams are used on
  // that thread.
  CUgreenCtx green = nullptr;
  if (green_contexts_exist.load(std::memory_order_relaxed) &&
      table().cuStreamGetGreenCtx(stream, &green) == CUDA_SUCCESS && green != nullptr) {
    context = nullptr;
  }
  const int device = green != nullptr ? current_device() : device_of(context);
  facts = {(flags & CU_STREAM_NON_BLOCKING) == 0, device, context};
  const SpinGuard guard(lock_);
  const std::uint64_t word = device_word(facts.device) | (facts.blocking ? kBlocking : 0);
  if (!guard.owns() || !streams_.set(handle_word(stream), {handle_word(context), word})) {
    unknown_.fetch_add(1, std::memory_order_relaxed);
  }
  return true;
}

void Registry::forget(CUstream stream) noexcept {
  const SpinGuard guard(lock_);
  if (guard.owns()) streams_.erase(handle_word(stream));
}

// ---- events

bool Registry::find(CUevent event, EventFacts& facts) const noexcept {
  HandleTable<2>::Words words{};
  if (!events_.find(handle_word(event), words)) return false;
  facts = event_facts(words);
  return true;
}

void Registry::note_event(CUevent event, bool is_shared) noexcept {
  CUcontext const context = current_context();
  const std::uint64_t word = device_word(current_device()) | (is_shared ? kShared : 0);
  const SpinGuard guard(lock_);
  if (!guard.owns() || !events_.set(handle_word(event), {handle_word(context), word})) {
    unknown_.fetch_add(1, std::memory_order_relaxed);
  }
}

void Registry::created(CUevent event, unsigned flags) noexcept {
  // Nothing is deferred in a green context, whose end does not tell which events end, too.
  if (green_contexts_exist.load(std::memory_order_relaxed) && shareable_context() == nullptr) return;
  note_event(event, (flags & CU_EVENT_INTERPROCESS) != 0);
}

void Registry::opened(CUevent event) noexcept { note_event(event, true); }

void Registry::shared(CUevent event) noexcept {
  const SpinGuard guard(lock_);
  HandleTable<2>::Words words{};
  if (guard.owns() && events_.find(handle_word(event), words)) {
    events_.set_word(handle_word(event), 1, words[1] | kShared);
  }
}

void Registry::recorded(CUevent event, bool capturing) noexcept {
  EventFacts facts;
  if (!find(event, facts) || facts.captured == capturing) return;
  const SpinGuard guard(lock_);
  HandleTable<2>::Words words{};
  if (!guard.owns() || !events_.find(handle_word(event), words)) return;
  events_.set_word(handle_word(event), 1, capturing ? words[1] | kCaptured : words[1] & ~kCaptured);
}

bool Registry::forget(CUevent event, EventFacts* facts) noexcept {
  const SpinGuard guard(lock_);
  HandleTable<2>::Words words{};
  if (!guard.owns() || !events_.find(handle_word(event), words)) return false;
  if (facts != nullptr) *facts = event_facts(words);
  return events_.erase(handle_word(event));
}

// ---- executable graphs

bool Registry::find(CUgraphExec exec, ExecFacts& facts) const noexcept {
  HandleTable<4>::Words words{};
  if (!execs_.find(handle_word(exec), words)) return false;
  facts = {words[0], static_cast<std::int64_t>(words[1]), static_cast<std::uint32_t>(words[2]),
           (words[2] & kPlain) != 0, (words[2] & kLaunched) != 0};
  return true;
}

void Registry::made(CUgraphExec exec, const ExecFacts& facts) noexcept {
  const std::uint64_t place = place_word(current_context(), current_device());
  if (!facts.plain) may_hold_memory();
  const SpinGuard guard(lock_);
  if (!guard.owns() ||
      !execs_.set(handle_word(exec), {facts.identity, static_cast<std::uint64_t>(facts.critical_path_ns),
                                      facts.nodes | (facts.plain ? kPlain : 0), place})) {
    unknown_.fetch_add(1, std::memory_order_relaxed);
  }
}

void Registry::launched(CUgraphExec exec) noexcept {
  ExecFacts facts;
  if (!find(exec, facts) || facts.launched) return;
  const SpinGuard guard(lock_);
  HandleTable<4>::Words words{};
  if (guard.owns() && execs_.find(handle_word(exec), words)) {
    execs_.set_word(handle_word(exec), 2, words[2] | kLaunched);
  }
}

bool Registry::changed(CUgraphExec exec) noexcept {
  const SpinGuard guard(lock_);
  HandleTable<4>::Words words{};
  if (!guard.owns() || !execs_.find(handle_word(exec), words)) return false;
  execs_.set_word(handle_word(exec), 2, words[2] & ~kLaunched);
  return (words[2] & kLaunched) != 0;
}

void Registry::forget(CUgraphExec exec) noexcept {
  const SpinGuard guard(lock_);
  if (!guard.owns()) return;
  execs_.erase(handle_word(exec));
  slices_.erase(handle_word(exec));
}

void* Registry::slices(CUgraphExec exec) const noexcept {
  HandleTable<1>::Words words{};
  return slices_.find(handle_word(exec), words) ? reinterpret_cast<void*>(words[0]) : nullptr;
}

bool Registry::has_slices(CUgraphExec exec, void* slices) noexcept {
  const SpinGuard guard(lock_);
  return guard.owns() && slices_.set(handle_word(exec), {handle_word(slices)});
}

// ---- contexts

void Registry::context_ends(CUcontext context) noexcept {
  const SpinGuard guard(lock_);
  if (!guard.owns()) return;
  streams_.clear();  // the driver is asked again for other contexts' streams
  events_.erase_if([&](std::uint64_t, const auto& words) { return words[0] == handle_word(context); });
  execs_.erase_if([&](std::uint64_t, const auto& words) { return context_at(words[3]) == context; });
}

Registry::Ended Registry::primary_context_ends(int device) noexcept {
  Ended ended;
  const SpinGuard guard(lock_);
  if (!guard.owns()) return ended;
  ended.device = device;
  streams_.clear();
  // Facts without memory to keep them stay forgotten.
  const auto take = [](auto& kept, std::uint64_t handle, const auto& words) {
    try {
      kept.emplace_back(handle, words);
    } catch (const std::exception&) {
    }
  };
  events_.erase_if([&](std::uint64_t handle, const auto& words) {
    if (device_in(words[1]) != device) return false;
    take(ended.events, handle, words);
    return true;
  });
  execs_.erase_if([&](std::uint64_t handle, const auto& words) {
    if (device_at(words[3]) != device) return false;
    take(ended.execs, handle, words);
    return true;
  });
  return ended;
}

void Registry::restore(const Ended& ended) noexcept {
  const SpinGuard guard(lock_);
  if (!guard.owns()) return;
  for (const auto& [handle, words] : ended.events) {
    if (!events_.contains(handle)) events_.set(handle, words);
  }
  for (const auto& [handle, words] : ended.execs) {
    if (!execs_.contains(handle)) execs_.set(handle, words);
  }
}

// ---- memory

std::uint32_t Registry::reach(int device) const noexcept {
  if (device < 0 || device >= kMostDevices || all_reach_.load(std::memory_order_relaxed)) return ~std::uint32_t{0};
  return reach_[static_cast<std::size_t>(device)].load(std::memory_order_relaxed) | std::uint32_t{1} << device;
}

void Registry::may_reach(int device, int owner) noexcept {
  if (device < 0 || device >= kMostDevices || owner < 0 || owner >= kMostDevices) return all_reach_all();
  reach_[static_cast<std::size_t>(owner)].fetch_or(std::uint32_t{1} << device, std::memory_order_relaxed);
}

// ---- life

void Registry::reset_in_child() noexcept {
  lock_.unlock();
  streams_.abandon();
  events_.abandon();
  execs_.abandon();
  slices_.abandon();
}

void Registry::clear() noexcept {
  const SpinGuard guard(lock_);
  streams_.clear();
  events_.clear();
  execs_.clear();
  slices_.clear();
  for (auto& each : reach_) each.store(0, std::memory_order_relaxed);
  all_reach_.store(false, std::memory_order_relaxed);
  graphs_hold_memory_.store(false, std::memory_order_relaxed);
  graphs_hold_objects_.store(false, std::memory_order_relaxed);
}

Registry& registry() noexcept {
  // Never destroyed: other threads may still launch while the process exits.
  alignas(Registry) static unsigned char storage[sizeof(Registry)];
  static Registry* const instance = new (storage) Registry();
  return *instance;
}

}  // namespace cudasched::driver
