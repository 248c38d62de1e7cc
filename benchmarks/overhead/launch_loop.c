/* CPU time of kernel launches through whatever libcuda.so.1 the loader finds; opens it at run time and links nothing.
 *
 *   launch_loop BATCHES LAUNCHES        with LAUNCH_LOOP_IMAGE=ptx or simulated
 *
 * Each batch is LAUNCHES launches timed together, then a synchronise outside the timing, so that the launch queue never
 * fills. Prints one line for each kernel: its name, then ns a launch in each batch; and a line "idle": the CPU time of
 * the whole process, its driver's and its hook's threads too, in ns a second, while it sleeps, once it has slept for
 * 0.4 s. Single-threaded. */
#define _GNU_SOURCE
#include <string.h>

#define PROGRAM "launch_loop"
#include "benchmarks/c_program.h"

enum { kWarmUpBatches = 50, kTenParameters = 10, kIdleSpells = 3, kIdleSpellMs = 400 };

static const char kPtx[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry empty() { ret; }\n"
    ".visible .entry ten(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3, .param .u64 p4,\n"
    "  .param .u64 p5, .param .u64 p6, .param .u64 p7, .param .u64 p8, .param .u64 p9) { ret; }\n";
static const char kSimulated[] =
    "cudasched-sim 1\n"
    "kernel empty regs=16 shared=0 threads_max=1024 block_us=1 blocks_per_sm=8\n"
    "kernel ten params=8,8,8,8,8,8,8,8,8,8 regs=16 shared=0 threads_max=1024 block_us=1 blocks_per_sm=8\n";

int main(int argc, char** argv) {
  const int batches = argc > 1 ? atoi(argv[1]) : 400;
  const int launches = argc > 2 ? atoi(argv[2]) : 200;
  const char* image = getenv("LAUNCH_LOOP_IMAGE");
  if (batches <= 0 || launches <= 0) {
    fprintf(stderr, "launch_loop: BATCHES and LAUNCHES must be above 0\n");
    return 2;
  }
  open_driver();
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  *(void**)&launch = need("cuLaunchKernel");
  int (*synchronize)(void*);
  *(void**)&synchronize = need("cuStreamSynchronize");

  void *module = NULL, *stream = NULL;
  const char* text = image != NULL && strcmp(image, "simulated") == 0 ? kSimulated : kPtx;
  start(text, &module, &stream);

  uint64_t values[kTenParameters] = {0};
  void* parameters[kTenParameters];
  for (int i = 0; i < kTenParameters; ++i) parameters[i] = &values[i];

  static const char* const kNames[] = {"empty", "ten"};
  for (int kernel = 0; kernel < 2; ++kernel) {
    void* const function = function_of(module, kNames[kernel]);
    void** arguments = kernel == 0 ? NULL : parameters;
    printf("%s", kNames[kernel]);
    for (int batch = -kWarmUpBatches; batch < batches; ++batch) {
      int failures = 0;
      const int64_t began = now_ns();
      for (int i = 0; i < launches; ++i) failures |= launch(function, 1, 1, 1, 32, 1, 1, 0, stream, arguments, NULL);
      const int64_t taken = now_ns() - began;
      check("cuLaunchKernel", failures);
      check("cuStreamSynchronize", synchronize(stream));
      if (batch >= 0) printf(" %.2f", (double)taken / launches);
    }
    printf("\n");
  }
  printf("idle");
  const struct timespec length = {0, kIdleSpellMs * 1000000L};
  nanosleep(&length, NULL);
  for (int spell = 0; spell < kIdleSpells; ++spell) {
    const int64_t before = read_ns(CLOCK_PROCESS_CPUTIME_ID);
    nanosleep(&length, NULL);
    printf(" %.2f", (double)(read_ns(CLOCK_PROCESS_CPUTIME_ID) - before) * 1000 / kIdleSpellMs);
  }
  printf("\n");
  return 0;
}
