/* A server whose requests copy, and a program that copies both ways all the time:
 *
 *   copies serve SECONDS RATE SEED   with COPIES_IMAGE=ptx or simulated
 *   copies copy BYTES
 *
 * A request copies 1 MB in, runs a kernel of 0.4 ms and copies 4 KiB out; requests come at random. Prints their
 * latencies from the scheduled arrival, ms. The other prints "ready" once a copy each way is complete, and at the end
 * of its standard input the bytes a second into the device and out of it. Each way two copies are outstanding. It
 * launches one kernel first, as a program does whose class counts. All host memory is pinned. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define PROGRAM "copies"
#include "benchmarks/c_program.h"

enum { kIn = 1000000, kOut = 4096, kKernelUs = 400, kWarmUp = 50, kOutstanding = 2 };

static const char kPtx[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry spin(.param .u32 us) {\n"
    "  .reg .u32 %us;\n  .reg .u64 %now, %end;\n  .reg .pred %early;\n"
    "  ld.param.u32 %us, [us];\n  mul.wide.u32 %end, %us, 1000;\n"
    "  mov.u64 %now, %globaltimer;\n  add.u64 %end, %end, %now;\n"
    "again:\n  mov.u64 %now, %globaltimer;\n  setp.lt.u64 %early, %now, %end;\n  @%early bra again;\n  ret;\n}\n";
static const char kSimulated[] = "cudasched-sim 1\nkernel spin params=4 block_us=param:0\n";

typedef int (*To)(uint64_t, const void*, size_t, void*);
typedef int (*From)(void*, uint64_t, size_t, void*);
static To to_device;
static From to_host;
static int (*synchronize)(void*);
static int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                     void**);
static void* spin; /* the kernel */

static void* pinned(size_t bytes) {
  void* memory = NULL;
  check("cuMemAllocHost", ((int (*)(void**, size_t))need("cuMemAllocHost_v2"))(&memory, bytes));
  memset(memory, 1, bytes);
  return memory;
}

static uint64_t on_device(size_t bytes) {
  uint64_t memory = 0;
  check("cuMemAlloc", ((int (*)(uint64_t*, size_t))need("cuMemAlloc_v2"))(&memory, bytes));
  return memory;
}

static void sleep_until(int64_t at_ns) {
  const struct timespec time = {at_ns / 1000000000, at_ns % 1000000000};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
}

static void launch_for(unsigned us, void* stream) {
  void* parameters[] = {&us};
  check("cuLaunchKernel", launch(spin, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
}

static int serve(void* stream, double seconds, double rate, long seed) {
  char* const host = pinned(kIn);
  const uint64_t device = on_device(kIn);
  srand48(seed);
  int64_t due_ns = 0, end_ns = 0;
  printf("[");
  for (int i = -kWarmUp; i <= 0 || due_ns < end_ns; ++i) {
    if (i == 0) end_ns = (due_ns = now_ns()) + (int64_t)(seconds * 1e9);
    if (i >= 0) sleep_until(due_ns);
    check("cuMemcpyHtoDAsync", to_device(device, host, kIn, stream));
    launch_for(kKernelUs, stream);
    check("cuMemcpyDtoHAsync", to_host(host, device, kOut, stream));
    check("cuStreamSynchronize", synchronize(stream));
    if (i >= 0) printf("%s%.4f", i == 0 ? "" : ", ", (double)(now_ns() - due_ns) / 1e6);
    due_ns += (int64_t)(-log(1 - drand48()) / rate * 1e9);
  }
  printf("]\n");
  return 0;
}

typedef struct {
  int inward;
  size_t bytes;
  void* context;
  atomic_long copied;
  int64_t began_ns, ended_ns; /* the first and the last completion; copied counts those behind the first */
} Way;

static atomic_int stopped;

static void* copy_one_way(void* argument) {
  Way* const way = argument;
  check("cuCtxSetCurrent", ((int (*)(void*))need("cuCtxSetCurrent"))(way->context));
  int (*record)(void*, void*);
  *(void**)&record = need("cuEventRecord");
  int (*await)(void*);
  *(void**)&await = need("cuEventSynchronize");
  void *stream = NULL, *events[kOutstanding];
  check("cuStreamCreate", ((int (*)(void**, unsigned))need("cuStreamCreate"))(&stream, 1));
  for (int i = 0; i < kOutstanding; ++i) {
    check("cuEventCreate", ((int (*)(void**, unsigned))need("cuEventCreate"))(&events[i], 2));
  }
  void* const host = pinned(way->bytes);
  const uint64_t device = on_device(way->bytes);
  for (long i = 0; !stopped; ++i) {
    if (i >= kOutstanding) {
      check("cuEventSynchronize", await(events[i % kOutstanding]));
      way->ended_ns = now_ns();
      if (i == kOutstanding) way->began_ns = way->ended_ns;
      way->copied = i - kOutstanding;
    }
    check("copy",
          way->inward ? to_device(device, host, way->bytes, stream) : to_host(host, device, way->bytes, stream));
    check("cuEventRecord", record(events[i % kOutstanding], stream));
  }
  check("cuStreamSynchronize", synchronize(stream));
  return NULL;
}

static int copy(void* stream, size_t bytes) {
  launch_for(1, stream);
  check("cuStreamSynchronize", synchronize(stream));
  Way ways[2] = {{.inward = 1, .bytes = bytes}, {.bytes = bytes}};
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) {
    check("cuCtxGetCurrent", ((int (*)(void**))need("cuCtxGetCurrent"))(&ways[i].context));
    pthread_create(&threads[i], NULL, copy_one_way, &ways[i]);
  }
  while (ways[0].copied == 0 || ways[1].copied == 0) usleep(1000);
  printf("ready\n");
  fflush(stdout);
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) > 0) continue;
  stopped = 1;
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  printf("[");
  for (int i = 0; i < 2; ++i) {
    const double seconds = (double)(ways[i].ended_ns - ways[i].began_ns) / 1e9;
    printf("%s%.0f", i == 0 ? "" : ", ", (double)ways[i].copied * (double)bytes / seconds);
  }
  printf("]\n");
  return 0;
}

int main(int argc, char** argv) {
  const int serves = argc == 5 && strcmp(argv[1], "serve") == 0;
  if (!serves && !(argc == 3 && strcmp(argv[1], "copy") == 0)) {
    fprintf(stderr, "copies: usage: copies serve SECONDS RATE SEED | copies copy BYTES\n");
    return 2;
  }
  open_driver();
  *(void**)&to_device = need("cuMemcpyHtoDAsync_v2");
  *(void**)&to_host = need("cuMemcpyDtoHAsync_v2");
  *(void**)&synchronize = need("cuStreamSynchronize");
  const char* const image = getenv("COPIES_IMAGE");
  void *module = NULL, *stream = NULL;
  start(image != NULL && strcmp(image, "simulated") == 0 ? kSimulated : kPtx, &module, &stream);
  *(void**)&launch = need("cuLaunchKernel");
  spin = function_of(module, "spin");
  return serves ? serve(stream, atof(argv[2]), atof(argv[3]), atol(argv[4]))
                : copy(stream, strtoull(argv[2], NULL, 10));
}
