// Lines for people, each in one write, on standard error or in a file:
//   cudasched: warning: text of the event
// In a file each line begins with the time (UTC) and the process: "2026-11-23T05:46:58.123Z 4711 cudasched: ...".
// cudasched.log has the same for Python. CUDASCHED_LOG sets the least level that is written: error, warning (the
// default), info or debug. CUDASCHED_LOG_FILE names the file.
//   error    scheduling is off for this process, or a request could not be met
//   warning  something works less well than the user may expect
//   info     findings and decisions, once a process: driver, device, class, table
//   debug    single decisions
// Never called on the launch path. Any thread may log, also in a child after fork: no lock is taken and no memory
// allocated. Of each level at most 30 lines at once and then one a second are written; the next line counts those left
// out. Where a file cannot be written, standard error gets the line. Where standard error is closed or full, the line
// is lost, and no signal reaches the program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cudasched::log {

enum class Level { kError = 0, kWarning = 1, kInfo = 2, kDebug = 3 };

void write(Level level, std::string_view message) noexcept;

// Whether lines of that level are written: for lines that cost something to make.
bool writes(Level level) noexcept;

// The least level by its name. Throws ConfigError.
void set_level(std::string_view name);

// The file; empty: standard error, despite the environment. Throws ConfigError if the path is too long.
void set_file(std::string_view path);

inline void error(std::string_view message) noexcept { write(Level::kError, message); }
inline void warning(std::string_view message) noexcept { write(Level::kWarning, message); }
inline void info(std::string_view message) noexcept { write(Level::kInfo, message); }
inline void debug(std::string_view message) noexcept { write(Level::kDebug, message); }

// A line of a file, with its newline; cut short where `room` is too small. `realtime_ns` counts from 1970, UTC; below
// 0: without time and process, as on standard error. Returns its bytes.
std::size_t format(char* line, std::size_t room, Level level, std::string_view message, std::int64_t realtime_ns,
                   int pid) noexcept;

}  // namespace cudasched::log
