#include "simulated_driver/kill_at.hpp"

#include <pthread.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <string_view>

namespace cudasched::simulated_driver {
namespace {

struct KillAt {
  std::array<char, 16> thread{};
  long step = 0;  // 0: never
};

KillAt read_kill_at() noexcept {
  const char* const text = std::getenv("CUDASCHED_SIM_KILL_AT");
  if (text == nullptr) return {};
  const std::string_view all(text);
  const std::size_t colon = all.rfind(':');
  KillAt result;
  if (colon == std::string_view::npos || colon >= result.thread.size()) return result;
  all.copy(result.thread.data(), colon);
  std::from_chars(text + colon + 1, text + all.size(), result.step);
  return result;
}

}  // namespace

void Steps::step() noexcept {
  static const KillAt at = read_kill_at();
  static std::atomic<long> steps{0};
  if (at.step == 0) return;
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  if (name == at.thread && ++steps == at.step) raise(SIGKILL);
}

}  // namespace cudasched::simulated_driver
