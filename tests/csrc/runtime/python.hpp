// What the engine looks up where Python is loaded, as this executable's own.
#pragma once

#include <atomic>

namespace cudasched::test {

// Does the calling thread hold the GIL?
std::atomic<bool>& gil_held() noexcept;

// How often a thread has let go of it.
inline std::atomic<int> gil_releases{0};

}  // namespace cudasched::test
