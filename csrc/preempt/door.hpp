// The door between libcuda and the kernel module: libcuda's own calls of ioctl(2) pass through it, and no other
// library's. watch() writes into the one word by which the driver's library finds ioctl (its relocation), after the
// library was loaded and before the program's first driver call has gone on; so it works preloaded and imported alike,
// and nothing else in the process is interposed.
#pragma once

#include <cstdint>

namespace cudasched::preempt {

class Groups;

class Door {
 public:
  // `driver`: the driver's library, of dlopen. False: it has no such word, or the word cannot be written; nothing was
  // changed then. Once a process: a second driver is refused.
  bool watch(void* driver, Groups& groups) noexcept;

  // What the driver's calls went to before.
  int call(int descriptor, unsigned long request, void* argument) const noexcept;
};

}  // namespace cudasched::preempt
