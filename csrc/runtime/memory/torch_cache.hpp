// PyTorch's cache in a program that says nothing of it: the PyTorch extension (csrc/torch), where it was built on this
// machine for the PyTorch that the process has loaded (`cudasched torch build`). Both take locks of the
// loader's: never called with one of the engine's held.
#pragma once

#include "cudasched/engine.h"

namespace cudasched::runtime {

// PyTorch for CUDA is in the process.
bool torch_is_loaded() noexcept;

// The function that empties PyTorch's cache; null where there is no extension for PyTorch. The extension is in the
// user's own cache directory, which no other user may write to, and is never unloaded. Reads files, and waits for as
// long as another thread is loading a library, which may be seconds.
cudasched_release_cache find_torch_cache() noexcept;

}  // namespace cudasched::runtime
