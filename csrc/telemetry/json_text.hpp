// Text as JSON has it, and this process's command line. May allocate and throw std::bad_alloc.
#pragma once

#include <array>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>

namespace cudasched::telemetry {

inline std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte >= 0x7F) {
      // Bytes stand for the characters of their number; the reader turns them back (surrogates would not survive JSON).
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", byte);
      out += escape.data();
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// A list of its words.
inline std::string command_json() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string out = "[";
  std::string word;
  while (std::getline(file, word, '\0')) out += (out.size() > 1 ? ", " : "") + json_text(word);
  return out + "]";
}

}  // namespace cudasched::telemetry
