// An entry point of the driver that the engine takes over, as programs can ask for it.
#pragma once

#include <string_view>

namespace cudasched::hook {

// As cuGetProcAddress knows it: one name, one signature from `since` on, and perhaps a per-thread-default-stream twin.
// As dlsym and linking know it: `exported`, and for the twin `exported` with _ptsz behind it.
struct EntryPoint {
  std::string_view name;
  int since;  // the CUDA version from which the name means this signature
  void* legacy;
  void* per_thread;  // null: the name has no twin
  const char* exported;
};

template <typename Function>
void* address(Function* function) noexcept {
  return reinterpret_cast<void*>(function);
}

}  // namespace cudasched::hook
