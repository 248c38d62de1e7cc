// A test double of libcuda.so.1 over the simulated GPU, written against CUDA's cuda.h without linking CUDA. Driver-API
// programs and cudasched's hook run on the double on any machine in real time; several processes share one device.
//
// Environment, read once, by the first call of a process that needs a device
//   CUDASCHED_SIM_DIR      where the shared devices lie; default /dev/shm/cudasched-sim-<uid>; made with mode 0700
//   CUDASCHED_SIM_SCALE    real seconds that a simulated second takes, 0.001 to 10000; default 20. The process that
//                          opens a device first decides for all.
//   CUDASCHED_SIM_DEVICES  how many devices there are, 0 to 64; default 1
//   CUDASCHED_SIM_DRIVER_VERSION
//                          the version of cuDriverGetVersion and cuGetProcAddress; default 13000
//   CUDASCHED_SIM_MIG      1: the devices are MIG instances, which show by their name
//   CUDASCHED_SIM_INTEGRATED  1: the devices say that they have the host's memory (CU_DEVICE_ATTRIBUTE_INTEGRATED)
//   CUDASCHED_SIM_MEMORY_MB  memory of a device in MiB, 1 to 1048576; default 65536. The process that opens a device
//                          first decides for all, and all share it: a context holds its memory until the end.
//   CUDASCHED_SIM_TIME_SLICES  how the kernel module takes calls about time slices (resource_manager.hpp)
//   CUDASCHED_SIM_KILL_AT  THREAD:STEP: the process dies of SIGKILL at that step of the threads of that name (as in
//                          /proc/PID/task/TID/comm), counted from 1, two a call: on its way in and on its way out
// A value that cannot be read makes cuInit fail with CUDA_ERROR_INVALID_VALUE.
//
// Module images are text, ended by NUL:
//   cudasched-sim 1
//   # a comment
//   kernel NAME params=8,8,4 regs=32 shared=0 threads_max=1024 block_us=20 blocks_per_sm=4 effect=none
// Attributes may stand in any order and may be left out (the values above are the defaults, no parameters by default);
// one space separates them; every line ends with a newline. params: the sizes of the parameters in bytes. block_us: the
// run time of one block, or `param:I`: the 4-byte unsigned parameter I holds that time. blocks_per_sm: how many blocks
// an SM holds at most (threads, registers and shared memory may allow fewer). Effects:
//   none    nothing
//   append  (u64* log, u64* cursor, u64 value, ...): log[(*cursor)++] = value
//   axpy    (float* y, const float* x, float a, u32 count, ...): y[i] += a * x[i]
//   condition (u64 handle, u32 value, ...): sets a condition of a graph, as cudaGraphSetConditional does
//   countdown (u64 handle, u64* counter, ...): takes one off the counter and sets the condition to whether any is left
// Anything else is CUDA_ERROR_INVALID_IMAGE.
//
// Time. The model's clock is the machine's monotonic clock divided by the scale. The double has no thread: the calling
// thread locks the device and runs the model up to now. All times that a program sees (cuEventElapsedTime) are real
// ones, as by its own clock: a block of 20 us takes 400 us at the default scale.
//
// Effects. Device memory is the process's own host memory. An operation's effect (copy, memset, kernel effect, host
// function, deferred free) happens when the owner process next synchronises, queries, or waits for room. Each effect
// happens exactly once, in the order in which the model completed the operations. An operation counts as complete only
// after its effect. So a program that never asks sees no effect. Effects of a killed process never happen. The thread
// that uses the device next removes the process's queued work, within about a millisecond. A host function may not call
// the driver: CUDA_ERROR_NOT_PERMITTED.
//
// Semantics kept: one primary context a device, context stacks a thread, stream order, priorities 0 to -5, per-thread
// default streams, all _ptsz/_ptds twins, events, CUkernel launches, occupancy. The legacy default stream waits for and
// holds back blocking streams. Stream capture has its three modes and their errors. Graph launches run branches side by
// side on up to 16 lanes, and launches of one executable graph one after another. An effect on memory that is not
// allocated gives a sticky CUDA_ERROR_ILLEGAL_ADDRESS. A forked child of a process that used the double gets
// CUDA_ERROR_NOT_INITIALIZED.
//
// Graphs. Nodes of kernels, copies, fills, host functions, child graphs, events, memory and none; edges with their data
// (a programmatic one orders as a plain one). Clones, deletion of nodes, updates as a whole and of single nodes with
// the refusals that cuda.h lists, switched-off nodes, user objects. An updated fill may not outgrow its instantiated
// size. The launching thread decides conditional nodes after the work before them is done, so the launch returns when
// the last of them is decided. A body's nodes run one after another. A graph with conditional or memory nodes cannot be
// cloned or instantiated twice. As in driver 580, a graph and its clones are not synchronised. Where two threads clone
// or destroy them at the same time, the process aborts. A graph may be instantiated for launches from the device, but
// no kernel here makes one. An executable graph takes 16 KiB and 1 KiB a node of the device's memory. Destructors of
// user objects run at the end of the driver call that made them due, on the calling thread.
//
// Limits. 64 contexts a device over all processes (then OUT_OF_MEMORY), and 256 streams a context, of which the default
// streams take one each (then OUT_OF_MEMORY). 1024 operations queued or not yet applied a context (then a launch waits;
// one of a larger graph until its last operations have found room). A wait for an event of another device blocks the
// caller. Not there: graph launches into a capture, batch memory operations, external semaphores, textures, arrays,
// virtual memory of the host or shared between processes, pools other than the default one, IPC, peers and MPS. Kernels
// of green contexts run on any SM. Of a kernel node's attributes the priority has an effect. A driver function without
// an entry here is absent from the library and from cuGetProcAddress; cuMemsetD16Async is absent from the library
// alone. Two functions of CUDA 15, which does not exist, come from cuGetProcAddress where the driver's version is that
// high.
//
// Inside: shared_device (the file), driver (objects of this process, progress), submission (work into the device),
// commands (operations' effects), graph (graphs and their instantiation), node_params (the driver's structures),
// capture (streams to graphs), entry_* (the exported functions; entry_versions has those that CUDA 13.0 lacks),
// proc_address (their table). An error is thrown where it is found, as Refused, and returned by the entry point.
#pragma once
