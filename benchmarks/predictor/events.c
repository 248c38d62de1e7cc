/* What two events around a kernel say of it, through whatever libcuda.so.1 the loader finds; links nothing.
 *
 *   events SAMPLES NS        with EVENTS_IMAGE=ptx or simulated
 *
 * The kernel waits for NS on the GPU's own clock. It is launched between two events
 *   "queued":  behind a kernel that keeps the GPU busy until all are in its queue,
 *   "starved": one after another with some of the host's own work between them, so that the GPU waits for each,
 *   "waited":  one at a time, each synchronised with.
 * Prints three lines for each case: its name, then ns between the two events of each launch; with "_call", ns that the
 * launch call took on the host; with "_behind", 1 for each launch whose first event was not complete when its second
 * had been recorded. Single-threaded. */
#define _GNU_SOURCE
#include <string.h>

#define PROGRAM "events"
#include "benchmarks/c_program.h"

enum { kBurst = 32, kWarmUp = 200, kLongNs = 2000000, kHostNs = 30000 };
enum { kQueued, kStarved, kWaited, kCases };
static const char* const kNames[kCases] = {"queued", "starved", "waited"};

static const char kPtx[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry wait(.param .u64 ns) {\n"
    "  .reg .u64 %t<4>;\n  .reg .pred %before;\n"
    "  ld.param.u64 %t0, [ns];\n"
    "  mov.u64 %t1, %globaltimer;\n"
    "  add.u64 %t1, %t1, %t0;\n"
    "again:\n"
    "  mov.u64 %t2, %globaltimer;\n"
    "  setp.lt.u64 %before, %t2, %t1;\n"
    "  @%before bra again;\n"
    "  ret;\n}\n";
static const char kSimulated[] =
    "cudasched-sim 1\nkernel wait params=8 regs=16 shared=0 threads_max=1024 block_us=20 blocks_per_sm=8\n";

int main(int argc, char** argv) {
  const int samples = argc > 1 ? atoi(argv[1]) : 320;
  uint64_t ns = argc > 2 ? strtoull(argv[2], NULL, 10) : 20000;
  const char* image = getenv("EVENTS_IMAGE");
  if (samples <= 0 || ns == 0) {
    fprintf(stderr, "events: SAMPLES and NS must be above 0\n");
    return 2;
  }
  open_driver();
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  *(void**)&launch = need("cuLaunchKernel");
  int (*record)(void*, void*);
  *(void**)&record = need("cuEventRecord");
  int (*synchronize)(void*);
  *(void**)&synchronize = need("cuStreamSynchronize");
  int (*elapsed)(float*, void*, void*);
  *(void**)&elapsed = need("cuEventElapsedTime");
  int (*create)(void**, unsigned);
  *(void**)&create = need("cuEventCreate");
  int (*query)(void*);
  *(void**)&query = need("cuEventQuery");

  void *module = NULL, *stream = NULL, *events[2 * kBurst];
  const char* text = image != NULL && strcmp(image, "simulated") == 0 ? kSimulated : kPtx;
  start(text, &module, &stream);
  void* const function = function_of(module, "wait");
  int* const is_behind = calloc((size_t)samples, sizeof *is_behind);
  int64_t* const call_ns = calloc((size_t)samples, sizeof *call_ns);
  if (is_behind == NULL || call_ns == NULL) return 1;
  for (int i = 0; i < 2 * kBurst; ++i) check("cuEventCreate", create(&events[i], 0));

  uint64_t long_ns = kLongNs;
  void *own[] = {&ns}, *ahead[] = {&long_ns};
  for (int i = 0; i < kWarmUp; ++i) check("cuLaunchKernel", launch(function, 1, 1, 1, 32, 1, 1, 0, stream, own, NULL));
  check("cuStreamSynchronize", synchronize(stream));
  for (int which = 0; which < kCases; ++which) {
    printf("%s", kNames[which]);
    for (int done = 0; done < samples; done += kBurst) {
      const int burst = samples - done < kBurst ? samples - done : kBurst;
      int failures = 0;
      if (which == kQueued) failures |= launch(function, 1, 1, 1, 32, 1, 1, 0, stream, ahead, NULL);
      for (int i = 0; i < burst; ++i) {
        const int64_t began = now_ns();
        while (which == kStarved && now_ns() - began < kHostNs + (int64_t)ns) {
        }
        failures |= record(events[2 * i], stream);
        const int64_t before = now_ns();
        failures |= launch(function, 1, 1, 1, 32, 1, 1, 0, stream, own, NULL);
        call_ns[done + i] = now_ns() - before;
        failures |= record(events[2 * i + 1], stream);
        is_behind[done + i] = query(events[2 * i]) != 0;
        if (which == kWaited) failures |= synchronize(stream);
      }
      failures |= synchronize(stream);
      check("a launch", failures);
      for (int i = 0; i < burst; ++i) {
        float ms = 0;
        check("cuEventElapsedTime", elapsed(&ms, events[2 * i], events[2 * i + 1]));
        printf(" %.0f", (double)ms * 1e6);
      }
    }
    printf("\n%s_call", kNames[which]);
    for (int i = 0; i < samples; ++i) printf(" %lld", (long long)call_ns[i]);
    printf("\n%s_behind", kNames[which]);
    for (int i = 0; i < samples; ++i) printf(" %d", is_behind[i]);
    printf("\n");
  }
  free(call_ns);
  free(is_behind);
  return 0;
}
