// What tests of the gate share: waiting for what must come, and a latency client of another process.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

#include "base/clock.hpp"
#include "hooked_driver.hpp"

namespace cudasched::test {

using namespace std::chrono_literals;

// Waits for what must come; the limit is only against a hang.
template <typename Condition>
::testing::AssertionResult eventually(Condition&& condition) {
  const auto limit = std::chrono::steady_clock::now() + 60s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > limit) return ::testing::AssertionFailure() << "it never came";
    std::this_thread::sleep_for(1ms);
  }
  return ::testing::AssertionSuccess();
}

// At the device's gate.
inline bool someone_waits() { return HookedDriver::instance().table().layout().waiting.load() != 0; }

// A client of another process: a slot of the table and nothing more, held by a forked child.
class OtherClient {
 public:
  using Act = std::function<void(arbiter::Table&, int slot)>;

  // A latency client.
  explicit OtherClient(bool active)
      : OtherClient(Class::kLatency, "other", [active](arbiter::Table& table, int slot) {
          if (active) table.set_active(slot, now_ns());
        }) {}

  // Does `begin` with its slot before the test goes on, and `act` each millisecond until it is killed.
  OtherClient(
      Class client_class, const char* name, const Act& begin, const Act& act = [](arbiter::Table&, int) {},
      const std::string& directory = HookedDriver::instance().run_directory()) {
    int ready[2];
    if (pipe(ready) != 0) throw std::runtime_error("pipe");
    const std::string uuid = driver::device_uuid(0);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // a failed test leaves nobody behind
      auto table = arbiter::Table::open(directory, uuid, "test");
      arbiter::ClientInfo client;
      client.client_class = client_class;
      client.name = name;
      const int slot = table->claim(client);
      begin(*table, slot);
      const auto byte = static_cast<char>(slot);
      if (write(ready[1], &byte, 1) != 1) _exit(1);
      for (;;) {
        table->slot(slot).heartbeat_ns.store(now_ns());
        act(*table, slot);
        usleep(1'000);
      }
    }
    char slot = -1;
    pollfd starts{ready[0], POLLIN, 0};
    if (poll(&starts, 1, 60'000) != 1 || read(ready[0], &slot, 1) != 1) {
      kill();
      throw std::runtime_error("the other client did not start");
    }
    slot_ = slot;
    close(ready[0]);
    close(ready[1]);
  }
  ~OtherClient() {
    kill();
    HookedDriver::instance().table().reap();
  }
  OtherClient(const OtherClient&) = delete;
  OtherClient& operator=(const OtherClient&) = delete;

  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  void stop() const { ::kill(pid_, SIGSTOP); }
  int slot() const { return slot_; }

 private:
  pid_t pid_ = -1;
  int slot_ = -1;
};

// Joined before the client is gone.
inline std::jthread kill_later(OtherClient& client, std::chrono::milliseconds after) {
  return std::jthread([&client, after] {
    std::this_thread::sleep_for(after);
    client.kill();
  });
}

}  // namespace cudasched::test
