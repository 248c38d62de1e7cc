// From a driver's handle to what is known of it: lookups are a few loads, from any thread, without a lock.
//
// Writers hold a lock of their own. What a handle leads to must stay in place for as long as lookups may run: a lookup
// beside erase() or clear() gives the old value or none, never another handle's.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace cudasched {

template <typename Value, std::size_t kSlots>
class HandleTable {
  static_assert((kSlots & (kSlots - 1)) == 0);

 public:
  // Null where it is not known.
  const Value* find(const void* handle) const noexcept {
    for (std::size_t probe = 0; probe < kProbes; ++probe) {
      const Slot& slot = slots_[place(handle, probe)];
      if (slot.handle.load(std::memory_order_acquire) != handle) continue;
      const Value* const value = slot.value.load(std::memory_order_acquire);
      // A slot that was given to another handle meanwhile shows it now.
      if (slot.handle.load(std::memory_order_acquire) == handle) return value;
    }
    return nullptr;
  }

  // `handle` is not null. False if there is no room near its place.
  bool insert(const void* handle, const Value* value) noexcept {
    Slot* chosen = nullptr;
    for (std::size_t probe = 0; probe < kProbes; ++probe) {
      Slot& slot = slots_[place(handle, probe)];
      const void* const taken = slot.handle.load(std::memory_order_relaxed);
      if (taken == handle) {
        slot.value.store(value, std::memory_order_release);
        return true;
      }
      if (taken == nullptr && chosen == nullptr) chosen = &slot;
    }
    if (chosen == nullptr) return false;
    chosen->value.store(value, std::memory_order_release);
    chosen->handle.store(handle, std::memory_order_release);
    return true;
  }

  void erase(const void* handle) noexcept {
    for (std::size_t probe = 0; probe < kProbes; ++probe) {
      Slot& slot = slots_[place(handle, probe)];
      if (slot.handle.load(std::memory_order_relaxed) == handle) slot.handle.store(nullptr, std::memory_order_release);
    }
  }

  void clear() noexcept {
    for (Slot& slot : slots_) slot.handle.store(nullptr, std::memory_order_release);
  }

 private:
  static constexpr std::size_t kProbes = 32;  // bounds a lookup, however full the table is

  struct Slot {
    std::atomic<const void*> handle{nullptr};
    std::atomic<const Value*> value{nullptr};
  };

  static std::size_t place(const void* handle, std::size_t probe) noexcept {
    const auto bits = reinterpret_cast<std::uintptr_t>(handle) * std::uintptr_t{0x9E37'79B9'7F4A'7C15};
    return (static_cast<std::size_t>(bits >> 32) + probe) & (kSlots - 1);
  }

  std::array<Slot, kSlots> slots_;
};

}  // namespace cudasched
