#include "base/log.hpp"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log_limit.hpp"
#include "base/undisturbed.hpp"

namespace cudasched::log {
namespace {

constexpr std::string_view kNames[] = {"error", "warning", "info", "debug"};
constexpr std::size_t kLineBytes = 1024;
constexpr std::size_t kPathBytes = 4096;

constexpr int kFromEnvironment = -1;
constinit std::atomic<int> chosen_level{kFromEnvironment};

constinit std::array<Limit, 4> limits{Limit(30, kNsPerSecond), Limit(30, kNsPerSecond), Limit(30, kNsPerSecond),
                                      Limit(30, kNsPerSecond)};

// Set rarely, by configuring threads, and read without a lock: two copies in turn, so that the one that is read stays.
constinit std::array<std::array<char, kPathBytes>, 2> chosen_files{};
constinit std::atomic<int> chosen_file{kFromEnvironment};

std::optional<Level> find_level(std::string_view name) noexcept {
  for (int level = 0; level < 4; ++level) {
    if (kNames[level] == name) return static_cast<Level>(level);
  }
  return std::nullopt;
}

Level least_level() noexcept {
  if (const int chosen = chosen_level.load(std::memory_order_relaxed); chosen >= 0) return static_cast<Level>(chosen);
  const char* wanted = std::getenv("CUDASCHED_LOG");
  return find_level(wanted == nullptr ? "" : wanted).value_or(Level::kWarning);
}

// Empty: standard error.
const char* file() noexcept {
  const int chosen = chosen_file.load(std::memory_order_acquire);
  const char* path =
      chosen >= 0 ? chosen_files[static_cast<std::size_t>(chosen)].data() : std::getenv("CUDASCHED_LOG_FILE");
  return path == nullptr ? "" : path;
}

// A name or a path may be another program's choice: no character may control the terminal.
void make_harmless(char* text, std::size_t bytes) noexcept {
  constexpr unsigned char kFirstOfC1 = 0xc2;
  for (std::size_t i = 0; i < bytes; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < bytes ? static_cast<unsigned char>(text[i + 1]) : 0U;
    if (byte < 0x20 || byte == 0x7f) text[i] = byte == '\n' || byte == '\t' ? ' ' : '?';
    if (byte == kFirstOfC1 && next >= 0x80 && next < 0xa0) text[i] = text[i + 1] = '?';
  }
}

bool write_whole(int descriptor, const char* line, std::size_t bytes) noexcept {
  ssize_t written = 0;
  do {
    written = ::write(descriptor, line, bytes);
  } while (written < 0 && errno == EINTR);
  return written == static_cast<ssize_t>(bytes);
}

// Opened for each line: no descriptor is left open for a child, a program that closes unknown ones, or a rotation. Does
// not wait: a named pipe without a reader is no file.
bool append(const char* path, const char* line, std::size_t bytes) noexcept {
  const int descriptor = ::open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0600);
  if (descriptor < 0) return false;
  const bool whole = write_whole(descriptor, line, bytes);
  ::close(descriptor);
  return whole;
}

void put(Level level, std::string_view message) noexcept {
  std::array<char, kLineBytes> line;
  if (const char* path = file(); *path != '\0') {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    const std::size_t bytes = format(line.data(), line.size(), level, message, now.tv_sec * kNsPerSecond + now.tv_nsec,
                                     static_cast<int>(::getpid()));
    if (append(path, line.data(), bytes)) return;
  }
  const std::size_t bytes = log::format(line.data(), line.size(), level, message, -1, 0);
  write_whole(STDERR_FILENO, line.data(), bytes);
}

}  // namespace

void set_level(std::string_view name) {
  const std::optional<Level> level = find_level(name);
  if (!level) throw ConfigError("log=" + std::string(name) + " has no meaning: it takes error, warning, info or debug");
  chosen_level.store(static_cast<int>(*level), std::memory_order_relaxed);
}

void set_file(std::string_view path) {
  if (path.size() >= kPathBytes)
    throw ConfigError("log_file: the path has over " + std::to_string(kPathBytes) + " bytes");
  const int next = chosen_file.load(std::memory_order_relaxed) == 0 ? 1 : 0;
  std::array<char, kPathBytes>& place = chosen_files[static_cast<std::size_t>(next)];
  std::copy(path.begin(), path.end(), place.begin());
  place[path.size()] = '\0';
  chosen_file.store(next, std::memory_order_release);
}

std::size_t format(char* line, std::size_t room, Level level, std::string_view message, std::int64_t realtime_ns,
                   int pid) noexcept {
  std::size_t begin = 0;
  if (realtime_ns >= 0) {
    // Not by gmtime_r, which takes a lock of the C library's that a child of fork may find taken for good.
    const std::chrono::sys_time<std::chrono::milliseconds> when{std::chrono::milliseconds(realtime_ns / kNsPerMs)};
    const auto day = std::chrono::floor<std::chrono::days>(when);
    const std::chrono::year_month_day date{day};
    const std::chrono::hh_mm_ss time{when - day};
    const int prefix =
        std::snprintf(line, room, "%04d-%02u-%02uT%02d:%02d:%02d.%03dZ %d ", static_cast<int>(date.year()),
                      static_cast<unsigned>(date.month()), static_cast<unsigned>(date.day()),
                      static_cast<int>(time.hours().count()), static_cast<int>(time.minutes().count()),
                      static_cast<int>(time.seconds().count()), static_cast<int>(time.subseconds().count()), pid);
    begin = std::min(static_cast<std::size_t>(std::max(prefix, 0)), room - 1);
  }
  const int length =
      std::snprintf(line + begin, room - begin, "cudasched: %s: %.*s\n", kNames[static_cast<int>(level)].data(),
                    static_cast<int>(message.size()), message.data());
  if (length <= 0) return 0;
  const std::size_t bytes = std::min(begin + static_cast<std::size_t>(length), room - 1);
  line[bytes - 1] = '\n';
  make_harmless(line, bytes - 1);
  return bytes;
}

bool writes(Level level) noexcept { return level <= least_level(); }

void write(Level level, std::string_view message) noexcept {
  if (level > least_level()) return;
  Limit& limit = limits[static_cast<std::size_t>(level)];
  if (!limit.admit(now_ns())) return;
  const int before = errno;
  {
    const Undisturbed undisturbed;
    if (const std::uint64_t left_out = limit.take_left_out(); left_out > 0) {
      std::array<char, 96> said;
      const int length =
          std::snprintf(said.data(), said.size(), "%" PRIu64 " lines were left out here: too many at once", left_out);
      put(level, std::string_view(said.data(), static_cast<std::size_t>(std::max(length, 0))));
    }
    put(level, message);
  }
  errno = before;
}

}  // namespace cudasched::log
