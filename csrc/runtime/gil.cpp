#include "runtime/gil.hpp"

#include <dlfcn.h>

#include <atomic>

namespace cudasched::runtime {
namespace {

constinit std::atomic<int (*)()> gil_check{nullptr};
constinit std::atomic<void* (*)()> gil_release{nullptr};
constinit std::atomic<void (*)(void*)> gil_restore{nullptr};

}  // namespace

void find_gil_check() noexcept {
  gil_restore.store(reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread")));
  gil_release.store(reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread")));
  gil_check.store(reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check")));
}

bool holds_gil() noexcept {
  auto* const check = gil_check.load(std::memory_order_relaxed);
  return check != nullptr && check() != 0;
}

GilReleased::GilReleased() noexcept {
  auto* const release = gil_release.load(std::memory_order_relaxed);
  if (release != nullptr && gil_restore.load(std::memory_order_relaxed) != nullptr && holds_gil()) state_ = release();
}

GilReleased::~GilReleased() {
  if (state_ != nullptr) gil_restore.load(std::memory_order_relaxed)(state_);
}

}  // namespace cudasched::runtime
