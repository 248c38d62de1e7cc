// A size as messages have it.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>

namespace cudasched {

// "512.0 MiB" or "40.2 GiB", with one decimal.
inline std::string size_text(std::uint64_t bytes, int decimals = 1) {
  std::array<char, 32> text{};
  const double mib = static_cast<double>(bytes) / (1 << 20);
  const bool large = mib >= 1024;
  std::snprintf(text.data(), text.size(), "%.*f %s", decimals, large ? mib / 1024 : mib, large ? "GiB" : "MiB");
  return text.data();
}

}  // namespace cudasched
