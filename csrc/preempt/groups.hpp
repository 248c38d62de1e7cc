// The channel groups of this process that run kernels, learned from the calls that libcuda makes of the kernel module.
// A context has one (a green context, and each context of a GPU of several, one of its own); groups of copy engines are
// left out.
//
// note_before() and note() are called around each such call, on the thread that makes it; never on the launch path,
// which makes none. They read what the kernel module reads, and change nothing. Everything may be called from any
// thread; lock_ is held for a few copies, never across a system call. Nothing allocates.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/spin_lock.hpp"

namespace cudasched::preempt {

// An open file: a descriptor may be closed by the program, and then name another one.
struct OpenFile {
  int descriptor = -1;
  dev_t filesystem = 0;
  ino_t inode = 0;
  dev_t device = 0;

  // The file that `descriptor` names now; its own descriptor is -1 where it names none.
  static OpenFile of(int descriptor) noexcept;
  bool operator==(const OpenFile&) const = default;
};

struct Group {
  OpenFile file;  // through which its client was allocated: no other one may control it
  std::uint32_t client = 0;
  std::uint32_t device = 0;
  std::uint32_t handle = 0;
  bool ends = false;  // the kernel module is about to free it
};

class Groups {
 public:
  static constexpr std::size_t kMost = 256;

  // An ioctl(2) of libcuda's is about to be made: what it frees is no longer there for others.
  void note_before(unsigned long request, const void* argument) noexcept;
  // It has returned `result`.
  void note(int descriptor, unsigned long request, const void* argument, int result) noexcept;

  // Copies at most kMost groups, none that ends; returns how many.
  std::size_t read(std::array<Group, kMost>& groups) const noexcept;

  // Changes with each group that comes.
  std::uint64_t made() const noexcept;
  // Groups that found no room: they keep the time slice that libcuda gives them.
  std::uint64_t overflows() const noexcept;

  // In a forked child, whose contexts are the parent's.
  void reset_in_child() noexcept;

 private:
  void add(int descriptor, std::uint32_t client, std::uint32_t device, std::uint32_t handle,
           std::uint64_t parameters) noexcept;
  // The groups that go with an object: itself, its device or its client.
  template <typename Visit>
  void for_each_of(std::uint32_t client, std::uint32_t object, Visit&& visit) noexcept;
  void remove(std::uint32_t client, std::uint32_t object) noexcept;

  mutable SpinLock lock_;
  std::array<Group, kMost> groups_{};
  std::size_t count_ = 0;
  std::uint64_t made_ = 0;
  std::uint64_t overflows_ = 0;
};

}  // namespace cudasched::preempt
