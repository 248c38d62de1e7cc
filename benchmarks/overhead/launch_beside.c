/* CPU time of a kernel launch beside another thread that launches on a stream of its own in the same context.
 *
 *   launch_beside BATCHES LAUNCHES        with LAUNCH_LOOP_IMAGE=ptx or simulated
 *
 * A host-bound program in small: a launch each 20 us, a batch's calls timed together without what is between them, then
 * a synchronise. Prints one line for each company: its name, then ns a launch in each batch. Companies take turns batch
 * by batch, so that all meet the same host.
 *
 *   alone       no other thread
 *   launching   one that launches each 40 us, as a launcher thread does whose kernels take so long
 *   marking     one that also records an event behind each launch and asks for it twice
 *   in_turns    as marking, where both spin until the other one is out of the driver */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define PROGRAM "launch_beside"
#include "benchmarks/c_program.h"

enum { kWarmUpBatches = 5, kOwnNs = 20000, kOtherNs = 40000 };
enum Company { kAlone, kLaunching, kMarking, kInTurns, kCompanies };

static const char* const kNames[] = {"alone", "launching", "marking", "in_turns"};
static const char kPtx[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry empty() { ret; }\n";
static const char kSimulated[] =
    "cudasched-sim 1\n"
    "kernel empty regs=16 shared=0 threads_max=1024 block_us=1 blocks_per_sm=8\n";

static int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                     void**);
static int (*synchronize)(void*);
static int (*set_current)(void*);
static int (*get_current)(void**);
static int (*stream_create)(void**, unsigned);
static int (*event_create)(void**, unsigned);
static int (*event_record)(void*, void*);
static int (*event_query)(void*);
static void* function;
static void* context;
static _Atomic int company = kAlone;
static atomic_flag in_driver = ATOMIC_FLAG_INIT;

static void spin_until(int64_t end) {
  while (now_ns() < end) {
  }
}

static void enter_driver(int now) {
  while (now == kInTurns && atomic_flag_test_and_set_explicit(&in_driver, memory_order_acquire)) __builtin_ia32_pause();
}
static void leave_driver(int now) {
  if (now == kInTurns) atomic_flag_clear_explicit(&in_driver, memory_order_release);
}

static int launch_on(void* stream) { return launch(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL); }

static void* keep_company(void* unused) {
  void *stream = NULL, *event = NULL;
  check("cuCtxSetCurrent", set_current(context));
  check("cuStreamCreate", stream_create(&stream, 1));
  check("cuEventCreate", event_create(&event, 2));
  for (int64_t next = now_ns();;) {
    const int now = company;
    if (now == kCompanies) return unused;
    if (now == kAlone) {
      const struct timespec nap = {0, 20000};
      nanosleep(&nap, NULL);
      next = now_ns();
      continue;
    }
    enter_driver(now);
    check("cuLaunchKernel", launch_on(stream));
    if (now != kLaunching) check("cuEventRecord", event_record(event, stream));
    leave_driver(now);
    for (int i = 0; now != kLaunching && i < 2; ++i) {
      enter_driver(now);
      (void)event_query(event);
      leave_driver(now);
    }
    next += kOtherNs;
    spin_until(next);
  }
}

int main(int argc, char** argv) {
  const int batches = argc > 1 ? atoi(argv[1]) : 100;
  const int launches = argc > 2 ? atoi(argv[2]) : 200;
  const char* image = getenv("LAUNCH_LOOP_IMAGE");
  if (batches <= 0 || launches <= 0) {
    fprintf(stderr, PROGRAM ": BATCHES and LAUNCHES must be above 0\n");
    return 2;
  }
  open_driver();
  *(void**)&launch = need("cuLaunchKernel");
  *(void**)&synchronize = need("cuStreamSynchronize");
  *(void**)&set_current = need("cuCtxSetCurrent");
  *(void**)&get_current = need("cuCtxGetCurrent");
  *(void**)&stream_create = need("cuStreamCreate");
  *(void**)&event_create = need("cuEventCreate");
  *(void**)&event_record = need("cuEventRecord");
  *(void**)&event_query = need("cuEventQuery");
  void *module = NULL, *stream = NULL;
  start(image != NULL && strcmp(image, "simulated") == 0 ? kSimulated : kPtx, &module, &stream);
  function = function_of(module, "empty");
  check("cuCtxGetCurrent", get_current(&context));
  pthread_t other;
  if (pthread_create(&other, NULL, &keep_company, NULL) != 0) {
    fprintf(stderr, PROGRAM ": no thread can be started\n");
    return 2;
  }

  double* const took = calloc((size_t)batches * kCompanies, sizeof *took);
  if (took == NULL) return 2;
  for (int batch = -kWarmUpBatches; batch < batches; ++batch) {
    for (int now = 0; now < kCompanies; ++now) {
      company = now;
      const struct timespec settles = {0, 300000};
      nanosleep(&settles, NULL);
      int failures = 0;
      int64_t in_calls = 0;
      for (int i = 0; i < launches; ++i) {
        const int64_t began = now_ns();
        enter_driver(now);
        failures |= launch_on(stream);
        leave_driver(now);
        in_calls += now_ns() - began;
        spin_until(began + kOwnNs);
      }
      check("cuLaunchKernel", failures);
      check("cuStreamSynchronize", synchronize(stream));
      if (batch >= 0) took[now * batches + batch] = (double)in_calls / launches;
    }
  }
  company = kCompanies;
  pthread_join(other, NULL);
  for (int now = 0; now < kCompanies; ++now) {
    printf("%s", kNames[now]);
    for (int batch = 0; batch < batches; ++batch) printf(" %.2f", took[now * batches + batch]);
    printf("\n");
  }
  return 0;
}
