// The differences between the processors that cudasched runs on: x86-64 and arm64.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif !defined(__aarch64__)
#error "cudasched runs on x86-64 and on arm64"
#endif

namespace cudasched {

// Where a CUDA toolkit has the libraries of this processor.
#if defined(__x86_64__)
inline constexpr char kToolkitTarget[] = "targets/x86_64-linux/lib";
#else
inline constexpr char kToolkitTarget[] = "targets/sbsa-linux/lib";
#endif

// In a loop that waits for another thread to store.
inline void spin_pause() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#else
  asm volatile("yield");
#endif
}

// The place of the thread's own storage: other than 0, and no other living thread's.
inline std::uintptr_t thread_pointer() noexcept {
  std::uintptr_t pointer;
#if defined(__x86_64__)
  asm("movq %%fs:0, %0" : "=r"(pointer));
#else
  asm("mrs %0, tpidr_el0" : "=r"(pointer));
#endif
  return pointer;
}

inline bool has_avx2() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") != 0;
#else
  return false;
#endif
}

}  // namespace cudasched
