// The door between libcuda and the kernel module: libcuda's own calls of ioctl(2) pass through it, and no other
// library's. watch() writes into the one word by which the driver's library finds ioctl (the relocation), after the
// library's load and before the first driver call continues. So the door works preloaded and imported alike, and
// nothing else in the process is interposed.
#pragma once

#include <cstdint>

namespace cudasched::preempt {

class Groups;

class Door {
 public:
  // `driver`: the driver's library, of dlopen. False: the library has no such word, or the word cannot be written;
  // nothing was changed then. Once a process: a second driver is refused.
  bool watch(void* driver, Groups& groups) noexcept;

  // The driver's original ioctl.
  int call(int descriptor, unsigned long request, void* argument) const noexcept;
};

}  // namespace cudasched::preempt
