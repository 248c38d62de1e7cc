// A driver function that csrc/hook takes over by signature: a line of entry_points.txt that is marked `hook`. A test
// finds functions without such a line, and the reverse.
#pragma once

namespace cudasched::hook {

struct TakenOver {
  const char* symbol;
  void* legacy = nullptr;
  void* per_thread = nullptr;  // the twin; null: there is none
};

template <typename Function>
void* address(Function* function) noexcept {
  return reinterpret_cast<void*>(function);
}

}  // namespace cudasched::hook
