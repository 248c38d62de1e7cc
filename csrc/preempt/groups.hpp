// The channel groups of this process that run kernels or copy, learned from the calls that libcuda makes of the kernel
// module. A context has one group that runs kernels, and so has a green context, and each context on each of several
// GPUs; each has a few more, one a copy engine.
//
// note_before() and note() surround each such call, on the calling thread; never on the launch path, which makes none.
// They read the kernel module's arguments, and change nothing. Everything may be called from any thread; lock_ is held
// for a few copies, never across a system call. Nothing allocates.
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

  // The file that `descriptor` names now; -1 as its descriptor where there is none.
  static OpenFile of(int descriptor) noexcept;
  bool operator==(const OpenFile&) const = default;
};

struct Group {
  OpenFile file;  // through which its client was allocated: no other file may control the group
  std::uint32_t client = 0;
  std::uint32_t device = 0;
  std::uint32_t handle = 0;
  bool copies = false;  // on a copy engine; else it runs kernels
  bool ends = false;    // the kernel module is about to free the group
};

class Groups {
 public:
  static constexpr std::size_t kMost = 512;
  static constexpr std::size_t kMostContexts = kMost / 2;  // groups that copy leave room for these

  // An ioctl(2) of libcuda's is about to be made: the objects that the call frees are no longer there for others.
  void note_before(unsigned long request, const void* argument) noexcept;
  // The call has returned `result`.
  void note(int descriptor, unsigned long request, const void* argument, int result) noexcept;

  // Copies at most kMost groups, none that ends; returns how many.
  std::size_t read(std::array<Group, kMost>& groups) const noexcept;

  // Changes with each group that comes.
  std::uint64_t made() const noexcept;
  // Groups that run kernels and found no room: libcuda's time slice stays.
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
