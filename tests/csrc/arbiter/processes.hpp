// Real processes for tests: a forked child runs a function, talks with the test through a socket, can be stopped and
// killed. Children die with the test. A child reports a failure by throwing; Process::finish then says so.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arbiter/table.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "private_directory.hpp"

namespace cudasched::arbiter::testing {

inline constexpr int kHangMs = 120'000;  // against hangs only

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

// A child whose test or parent has gone ends without a word.
struct Ended : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One end of a conversation in numbers.
class Link {
 public:
  explicit Link(int socket) : socket_(socket) {}
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link() { close(socket_); }

  void send(std::int64_t value) const {
    if (::send(socket_, &value, sizeof value, MSG_NOSIGNAL) != sizeof value) throw Ended("the other process has ended");
  }
  std::int64_t receive() const {
    pollfd ready{socket_, POLLIN, 0};
    require(poll(&ready, 1, kHangMs) == 1, "the other process does not answer");
    std::int64_t value = 0;
    if (recv(socket_, &value, sizeof value, 0) != sizeof value) throw Ended("the other process has ended");
    return value;
  }

 private:
  int socket_;
};

class Process {
 public:
  explicit Process(const std::function<void(const Link&)>& body) : Process(body, pair()) {}
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() { kill(); }

  pid_t pid() const { return pid_; }
  void send(std::int64_t value) const { link_.send(value); }
  std::int64_t receive() const { return link_.receive(); }
  std::int64_t ask(std::int64_t value) const {
    send(value);
    return receive();
  }

  // SIGKILL, and waits until it is gone.
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  void stop() const {
    ::kill(pid_, SIGSTOP);
    int status = 0;
    require(waitpid(pid_, &status, WUNTRACED) == pid_ && WIFSTOPPED(status), "the process did not stop");
  }
  void resume() const { ::kill(pid_, SIGCONT); }

  // Waits for its end by itself; true if its function returned.
  bool finish() {
    int status = -1;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  static std::pair<int, int> pair() {
    int sockets[2];
    require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0, "socketpair");
    return {sockets[0], sockets[1]};
  }

  Process(const std::function<void(const Link&)>& body, std::pair<int, int> sockets) : link_(sockets.first) {
    fflush(nullptr);
    const pid_t parent = getpid();
    pid_ = fork();
    require(pid_ >= 0, "fork");
    if (pid_ != 0) {
      close(sockets.second);
      return;
    }
    close(sockets.first);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent && getppid() != 0) _exit(3);  // 0: its parent is in another pid namespace
    int code = 0;
    try {
      body(Link(sockets.second));
    } catch (const Ended&) {
      code = 2;
    } catch (const std::exception& error) {
      fprintf(stderr, "child %d: %s\n", static_cast<int>(getpid()), error.what());
      code = 1;
    }
    _exit(code);
  }

  Link link_;
  pid_t pid_ = -1;
};

// Enters new namespaces, as root or through a user namespace. errno says why not.
inline bool enter_namespaces(int flags) {
  if (unshare(flags) == 0) return true;
  const uid_t user = geteuid();
  const gid_t group = getegid();
  if (unshare(flags | CLONE_NEWUSER) != 0) return false;
  std::ofstream("/proc/self/uid_map") << user << ' ' << user << " 1";
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/gid_map") << group << ' ' << group << " 1";
  return geteuid() == user && getegid() == group;
}

// Waits until something comes true; false only after the time-out against hangs.
inline bool eventually(const std::function<bool()>& holds) {
  const std::int64_t until_ns = now_ns() + std::int64_t{kHangMs} * kNsPerMs;
  while (!holds()) {
    if (now_ns() > until_ns) return false;
    usleep(200);
  }
  return true;
}

// What a call throws as ArbiterError; empty if it throws nothing.
inline std::string arbiter_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const ArbiterError& error) {
    return error.what();
  }
  return {};
}

constexpr std::uint64_t bit(std::int64_t slot) { return std::uint64_t{1} << slot; }
constexpr std::uint64_t turn_of(std::int64_t slot) {
  return static_cast<std::uint64_t>(slot + 1) << kTurnSlotShift | 12'345;
}

inline ClientInfo client(Class client_class, std::string name = "client") {
  ClientInfo info;
  info.client_class = client_class;
  info.name = std::move(name);
  return info;
}

// Nothing in the table speaks of any slot.
inline ::testing::AssertionResult is_empty(const Layout& layout) {
  int occupied = 0;
  for (const Slot& slot : layout.slots) occupied += slot.occupied.load() != 0 ? 1 : 0;
  if (layout.active == 0 && layout.latency == 0 && layout.best_effort == 0 && layout.waiting == 0 &&
      layout.turn >> kTurnSlotShift == 0 && occupied == 0) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << std::hex << "active " << layout.active << " latency " << layout.latency
                                       << " best effort " << layout.best_effort << " waiting " << layout.waiting
                                       << " turn " << layout.turn << " occupied slots " << std::dec << occupied;
}

inline constexpr const char* kUuid = "GPU-01234567-89ab-cdef-0123-456789abcdef";
inline constexpr const char* kDevice = "Test GPU";

class TableTest : public ::testing::Test {
 protected:
  std::unique_ptr<Table> open() const { return Table::open(directory_, kUuid, kDevice); }
  ino_t inode() const {
    struct stat status {};
    return stat(path_.c_str(), &status) == 0 ? status.st_ino : 0;
  }
  std::vector<char> read_file() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void write_file(const std::vector<char>& bytes) const {
    std::filesystem::create_directory(directory_);
    std::filesystem::permissions(directory_, std::filesystem::perms::owner_all);
    std::ofstream(path_, std::ios::binary | std::ios::trunc)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    std::filesystem::permissions(path_, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  }

  const test::PrivateDirectory private_ = test::PrivateDirectory::in_memory();
  const std::string base_ = private_.path();
  const std::string directory_ = base_ + "/run";
  const std::string path_ = directory_ + "/" + kUuid + ".arbiter";
};

}  // namespace cudasched::arbiter::testing
