// The kernel module's side of libcuda's ioctl(2), as far as csrc/preempt reads and uses it: each context has one
// channel group, whose time slice can be read and set through the file that allocated its client. Like libcuda, the
// double sets a slice of its own 0.1 s after it has made a context, over what was set before.
//
// Its calls go through ioctl of libc, where libcuda's do, so that what stands in front of that sees them; the file is
// /dev/null, where the call fails and changes nothing if nobody does. CUDASCHED_SIM_TIME_SLICES: `on`, the default;
// `refused` (the kernel module lacks the permission), `unsupported`, `forbidden` (ioctl itself fails), `unknown`
// (allocations have another layout), `closed` (the program closes the file).
#pragma once

#include <cstdint>

namespace cudasched::simulated_driver {

struct Context;

// The context has been given its place in the model; it is about to lose it.
void make_channel_group(Context& context);
void free_channel_group(Context& context);

}  // namespace cudasched::simulated_driver

// What the kernel module does. Any thread.
extern "C" __attribute__((visibility("default"))) int cudasched_simulated_ioctl(int descriptor, unsigned long request,
                                                                                ...);
