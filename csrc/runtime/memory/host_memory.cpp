#include "runtime/memory/host_memory.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
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

std::uint64_t control_group_room(const std::string& membership, const std::string& root) {
  std::ifstream file(membership);
  std::string group;
  while (std::getline(file, group) && !group.starts_with("0::")) {
  }
  if (!group.starts_with("0::/")) return kUnknownMemory;
  std::uint64_t room = kUnknownMemory;
  for (group.erase(0, 3);; group.erase(group.rfind('/'))) {
    std::uint64_t most = 0;
    std::uint64_t used = 0;
    std::ifstream limit(root + group + "/memory.max");  // "max" is no number
    std::ifstream current(root + group + "/memory.current");
    if (limit >> most && current >> used) {
      // The kernel takes files back that no program has used of late.
      std::ifstream statistics(root + group + "/memory.stat");
      std::uint64_t files = 0;
      for (std::string name; statistics >> name >> files && name != "inactive_file"; files = 0) {
      }
      room = std::min(room, most - std::min(most, used - std::min(used, files)));
    }
    if (group.empty() || group == "/") return room;
  }
}

std::uint64_t room_on_host() { return std::min(available_host_bytes(), control_group_room()); }

}  // namespace cudasched::runtime
