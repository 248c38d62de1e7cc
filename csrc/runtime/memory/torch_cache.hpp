// PyTorch's cache in a program that says nothing of it: the PyTorch extension (csrc/torch), where it was built on this
// machine for the PyTorch that the process has loaded (`cudasched torch build`). Takes the loader's lock: never called
// with a lock of the engine's held.
#pragma once

#include "cudasched/engine.h"

namespace cudasched::runtime {

enum class TorchCache {
  kNotLoaded,  // PyTorch for CUDA is not in the process, so far
  kNone,       // it is, and there is no extension for it
  kFound,
};

// On kFound, `release` empties PyTorch's cache. The extension is in the user's own cache directory, and nobody else may
// write to it; it is never unloaded.
TorchCache find_torch_cache(cudasched_release_cache& release) noexcept;

}  // namespace cudasched::runtime
