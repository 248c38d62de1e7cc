// The kernel module's side of libcuda's ioctl(2), as far as csrc/preempt reads and uses it: each context has a
// channel group for kernels and one for copies. A group's time slice can be read and set through the file that
// allocated the group's client. Like libcuda, the double sets a slice of its own 0.1 s after a context's creation, over
// any earlier one, for kernels.
//
// The double's calls go through ioctl of libc, as libcuda's do, so that an interposer sees them. The file is /dev/null:
// without an interposer the call fails and changes nothing. CUDASCHED_SIM_TIME_SLICES: `on`, the default; `refused`
// (the process lacks the permission), `copies refused`, `unsupported`, `forbidden` (ioctl itself fails), `unknown`
// (allocations have another layout), `closed` (the program closes the file).
#pragma once

#include <cstdint>

namespace cudasched::simulated_driver {

struct Context;

// After the context has got its place in the model; before it loses that.
void make_channel_groups(Context& context);
void free_channel_groups(Context& context);

}  // namespace cudasched::simulated_driver

// The kernel module's answers. Any thread.
extern "C" __attribute__((visibility("default"))) int cudasched_simulated_ioctl(int descriptor, unsigned long request,
                                                                                ...);
