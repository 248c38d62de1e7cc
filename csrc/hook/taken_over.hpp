// A driver function that csrc/hook takes over by signature: a line of entry_points.txt that is marked `hook`. A test
// finds functions without such a line, and the reverse.
#pragma once

namespace cudasched::hook {

template <typename Function>
void* address(Function* function) noexcept {
  return reinterpret_cast<void*>(function);
}

struct TakenOver {
  template <typename Function>
  TakenOver(const char* exported, Function* ours, Function* twin = nullptr) noexcept
      : symbol(exported), legacy(address(ours)), per_thread(address(twin)) {}

  const char* symbol;
  void* legacy;
  void* per_thread;  // the twin; null: there is none
};

}  // namespace cudasched::hook
