// The three scheduling classes of a launch, and their names.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace cudasched {

enum class Class : std::uint8_t {
  kNormal = 0,      // passes at once, holds no launch back; the default
  kLatency = 1,     // passes at once, and closes the gate for best-effort work while active
  kBestEffort = 2,  // waits at the gate
};

inline constexpr int kClassCount = 3;

// "latency", "normal", "best_effort".
std::string_view class_name(Class value) noexcept;

// Accepts the names above and "best-effort"; nothing else.
std::optional<Class> parse_class(std::string_view name) noexcept;

}  // namespace cudasched
