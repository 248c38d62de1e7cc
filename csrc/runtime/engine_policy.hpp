// A user's own policy in C, as the ticker watches it.
#pragma once

#include <cstdint>

namespace cudasched::runtime {

// Since when a policy in C has been asked that has not answered yet, by any thread; 0: none is being asked.
std::int64_t policy_asked_since_ns() noexcept;

}  // namespace cudasched::runtime
