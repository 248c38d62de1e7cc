#include "python.hpp"

namespace cudasched::test {

std::atomic<bool>& gil_held() noexcept {
  static thread_local std::atomic<bool> held{false};
  return held;
}

}  // namespace cudasched::test

using cudasched::test::gil_held;

extern "C" {

__attribute__((visibility("default"))) int PyGILState_Check() { return gil_held().load() ? 1 : 0; }

__attribute__((visibility("default"))) void* PyEval_SaveThread() {
  gil_held().store(false);
  cudasched::test::gil_releases.fetch_add(1);
  return &gil_held();
}

__attribute__((visibility("default"))) void PyEval_RestoreThread(void* held) {
  static_cast<std::atomic<bool>*>(held)->store(true);
}
}
