#include "runtime/memory/host_memory.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <string_view>

namespace cudasched::runtime {

std::uint64_t available_host_bytes(const char* path) noexcept {
  constexpr std::string_view kLine = "MemAvailable:";  // among the first three
  constexpr std::uint64_t kKiB = 1024;
  std::array<char, 512> text{};
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return kUnknownMemory;
  const ssize_t bytes = read(file, text.data(), text.size());
  close(file);
  const std::string_view said(text.data(), bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  const std::size_t line = said.find(kLine);
  if (line == std::string_view::npos) return kUnknownMemory;
  const std::size_t begin = said.find_first_not_of(' ', line + kLine.size());
  if (begin == std::string_view::npos) return kUnknownMemory;
  std::uint64_t kib = 0;
  const auto [end, error] = std::from_chars(said.data() + begin, said.data() + said.size(), kib);
  return error == std::errc{} && kib < kUnknownMemory / kKiB ? kib * kKiB : kUnknownMemory;
}

}  // namespace cudasched::runtime
