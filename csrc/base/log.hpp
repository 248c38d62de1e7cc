// Lines on standard error, each in one write: "cudasched: warning: ...". CUDASCHED_LOG sets the least level that is
// written: error, warning (the default), info or debug.
//   error    scheduling is off for this process, or a request could not be met
//   warning  something works less well than the user may expect
//   info     what was found and decided, once a process: driver, device, class, table
//   debug    single decisions
// Never called on the launch path.
#pragma once

#include <string_view>

namespace cudasched::log {

enum class Level { kError = 0, kWarning = 1, kInfo = 2, kDebug = 3 };

void write(Level level, std::string_view message) noexcept;

// The least level by its name. Throws ConfigError.
void set_level(std::string_view name);

inline void error(std::string_view message) noexcept { write(Level::kError, message); }
inline void warning(std::string_view message) noexcept { write(Level::kWarning, message); }
inline void info(std::string_view message) noexcept { write(Level::kInfo, message); }
inline void debug(std::string_view message) noexcept { write(Level::kDebug, message); }

}  // namespace cudasched::log
