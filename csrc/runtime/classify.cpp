#include "runtime/classify.hpp"

#include "base/hash.hpp"

namespace cudasched::runtime {

constinit thread_local ThreadState thread_state;

bool StreamClasses::bind(std::uint64_t stream, Class value) noexcept {
  const std::size_t home = static_cast<std::size_t>(mix(0, stream)) % kSlots;
  Slot* target = nullptr;
  for (std::size_t step = 0; step < kProbes; ++step) {
    Slot& slot = slots_[(home + step) % kSlots];
    const std::uint64_t held = slot.stream.load(std::memory_order_relaxed);
    if (held == stream) {
      slot.value.store(value, std::memory_order_release);
      return true;
    }
    if (target == nullptr && (held == kRemoved || held == 0)) target = &slot;
    if (held == 0) break;
  }
  if (target == nullptr || count_.load(std::memory_order_relaxed) >= kCapacity) return false;
  target->value.store(value, std::memory_order_relaxed);
  target->stream.store(stream, std::memory_order_release);
  count_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void StreamClasses::unbind(std::uint64_t stream) noexcept {
  const std::size_t home = static_cast<std::size_t>(mix(0, stream)) % kSlots;
  for (std::size_t step = 0; step < kProbes; ++step) {
    Slot& slot = slots_[(home + step) % kSlots];
    const std::uint64_t held = slot.stream.load(std::memory_order_relaxed);
    if (held == 0) return;
    if (held == stream) {
      slot.stream.store(kRemoved, std::memory_order_release);
      count_.fetch_sub(1, std::memory_order_relaxed);
      return;
    }
  }
}

bool StreamClasses::find(std::uint64_t stream, Class& value) const noexcept {
  const std::size_t home = static_cast<std::size_t>(mix(0, stream)) % kSlots;
  for (std::size_t step = 0; step < kProbes; ++step) {
    const Slot& slot = slots_[(home + step) % kSlots];
    const std::uint64_t held = slot.stream.load(std::memory_order_acquire);
    if (held == 0) return false;
    if (held == stream) {
      value = slot.value.load(std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace cudasched::runtime
