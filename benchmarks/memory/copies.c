/* Programs that copy, hold memory and ask for it; with COPIES_IMAGE=ptx or simulated:
 *
 *   copies serve SECONDS RATE SEED      a server; a request copies 1 MB in, runs a kernel of 0.4 ms and copies 4 KiB
 *                                       out. Requests come at random. Prints when each was due (monotonic, ms) and its
 *                                       latency from then on (ms).
 *   copies copy BYTES                   copies both ways all the time, two copies outstanding each way. Prints "ready"
 *                                       once a copy each way is complete, and at the end of its standard input the
 *                                       bytes a second into the device and out of it
 *   copies rate BYTES                   prints the bytes a second of one copy out of the device and into it, the median
 *   copies train BLOCKS BYTES STEPS PAUSE_US eager|graph|unsummed
 *                                       prints "ready", and after a byte of its standard input changes every word of
 *                                       its blocks in each step. Prints the times of the steps (ms), their end
 *                                       (monotonic, ms) and a sum over all words, unless unsummed, and ends with its
 *                                       standard input. 0 steps: as many as until then
 *   copies need BYTES LEFT              takes all memory but LEFT bytes. For each line of its standard input takes
 *                                       BYTES, more than are left, or frees them and waits until another program has
 *                                       most of the difference. Prints how long that took, ms
 *   copies free                         prints the bytes of the GPU that are free
 *   copies allocate                     prints how long an allocation and its free take by size, us, the median
 *
 * All launch one kernel first, as a program does whose class counts. All host memory is pinned. */
#define _GNU_SOURCE
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define PROGRAM "copies"
#include "benchmarks/c_program.h"

enum { kIn = 1000000, kOut = 4096, kKernelUs = 400, kWarmUp = 50, kOutstanding = 2, kStepsMost = 100000, kTimes = 21 };

static const char kPtx[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry spin(.param .u32 us) {\n"
    "  .reg .u32 %us;\n  .reg .u64 %now, %end;\n  .reg .pred %early;\n"
    "  ld.param.u32 %us, [us];\n  mul.wide.u32 %end, %us, 1000;\n"
    "  mov.u64 %now, %globaltimer;\n  add.u64 %end, %end, %now;\n"
    "again:\n  mov.u64 %now, %globaltimer;\n  setp.lt.u64 %early, %now, %end;\n  @%early bra again;\n  ret;\n}\n"
    /* values[i] = values[i] * K + value + i, for each of so many words; `count` is the simulated kernel's */
    ".visible .entry append(.param .u64 values, .param .u64 count, .param .u64 value, .param .u32 words) {\n"
    "  .reg .u32 %i, %n, %each, %block;\n  .reg .u64 %base, %at, %x, %add, %wide;\n  .reg .pred %over;\n"
    "  ld.param.u64 %base, [values];\n  ld.param.u64 %add, [value];\n  ld.param.u32 %n, [words];\n"
    "  mov.u32 %each, %ntid.x;\n  mov.u32 %block, %ctaid.x;\n  mov.u32 %i, %tid.x;\n"
    "  mad.lo.u32 %i, %block, %each, %i;\n  mov.u32 %block, %nctaid.x;\n  mul.lo.u32 %each, %each, %block;\n"
    "again:\n  setp.ge.u32 %over, %i, %n;\n  @%over ret;\n"
    "  mul.wide.u32 %at, %i, 8;\n  add.u64 %at, %at, %base;\n  ld.global.u64 %x, [%at];\n"
    "  cvt.u64.u32 %wide, %i;\n  add.u64 %wide, %wide, %add;\n"
    "  mad.lo.u64 %x, %x, 6364136223846793005, %wide;\n  st.global.u64 [%at], %x;\n"
    "  add.u32 %i, %i, %each;\n  bra again;\n}\n";
static const char kSimulated[] =
    "cudasched-sim 1\nkernel spin params=4 block_us=param:0\n"
    "kernel append params=8,8,8,4 block_us=param:3 effect=append\n";
static int simulated;

typedef int (*To)(uint64_t, const void*, size_t, void*);
typedef int (*From)(void*, uint64_t, size_t, void*);
static To to_device;
static From to_host;
static int (*synchronize)(void*);
static int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                     void**);
static void *spin, *append; /* the kernels */

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

static void free_on_device(uint64_t memory) { check("cuMemFree", ((int (*)(uint64_t))need("cuMemFree_v2"))(memory)); }

static size_t free_bytes(void) {
  size_t free = 0, all = 0;
  check("cuMemGetInfo", ((int (*)(size_t*, size_t*))need("cuMemGetInfo_v2"))(&free, &all));
  return free;
}

static int by_value(const void* one, const void* other) {
  const double difference = *(const double*)one - *(const double*)other;
  return (difference > 0) - (difference < 0);
}

static double median(double* values, int count) {
  qsort(values, (size_t)count, sizeof *values, by_value);
  return values[count / 2];
}

static void sleep_until(int64_t at_ns) {
  const struct timespec time = {at_ns / 1000000000, at_ns % 1000000000};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
}

static void launch_for(unsigned us, void* stream) {
  void* parameters[] = {&us};
  check("cuLaunchKernel", launch(spin, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
}

static void change(uint64_t block, size_t bytes, uint64_t step, void* stream) {
  uint64_t values = block + 8;
  unsigned words = simulated ? 20 : (unsigned)(bytes / 8 - 1);
  void* parameters[] = {&values, &block, &step, &words};
  check("cuLaunchKernel", launch(append, 1056, 1, 1, 256, 1, 1, 0, stream, parameters, NULL));
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
    if (i >= 0) {
      printf("%s[%.4f, %.4f]", i == 0 ? "" : ", ", (double)due_ns / 1e6, (double)(now_ns() - due_ns) / 1e6);
    }
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

static const int64_t kPatienceNs = 30000000000;
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

static int copy(size_t bytes) {
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

static int rate(void* stream, size_t bytes) {
  void* const host = pinned(bytes);
  const uint64_t device = on_device(bytes);
  for (int inward = 0; inward < 2; ++inward) {
    double rates[kTimes];
    for (int i = 0; i < kTimes; ++i) {
      const int64_t began_ns = now_ns();
      check("copy", inward ? to_device(device, host, bytes, stream) : to_host(host, device, bytes, stream));
      check("cuStreamSynchronize", synchronize(stream));
      rates[i] = (double)bytes / (double)(now_ns() - began_ns) * 1e9;
    }
    printf("%s%.0f", inward ? ", " : "[", median(rates, kTimes));
  }
  printf("]\n");
  return 0;
}

static int input_ended(void) {
  struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
  char byte = 0;
  return poll(&input, 1, 0) > 0 && read(STDIN_FILENO, &byte, 1) <= 0;
}

/* A step, launched by launch; or, of a graph, by that. */
static void* graph_of(int blocks, const uint64_t* memory, size_t bytes, void* stream) {
  void *graph = NULL, *executable = NULL;
  check("cuStreamBeginCapture", ((int (*)(void*, unsigned))need("cuStreamBeginCapture_v2"))(stream, 2));
  for (int i = 0; i < blocks; ++i) change(memory[i], bytes, 7, stream);
  check("cuStreamEndCapture", ((int (*)(void*, void**))need("cuStreamEndCapture"))(stream, &graph));
  check("cuGraphInstantiate",
        ((int (*)(void**, void*, unsigned long long))need("cuGraphInstantiateWithFlags"))(&executable, graph, 0));
  return executable;
}

static uint64_t sum_of(uint64_t memory, size_t bytes, void* stream) {
  static uint64_t* host;
  if (host == NULL) host = pinned(bytes);
  check("cuMemcpyDtoHAsync", to_host(host, memory, bytes, stream));
  check("cuStreamSynchronize", synchronize(stream));
  uint64_t sum = 0;
  for (size_t i = 0; i < bytes / 8; ++i) sum = sum * 31 + host[i];
  return sum;
}

static int train(void* stream, int blocks, size_t bytes, int steps, unsigned pause_us, const char* how) {
  const int is_graph = strcmp(how, "graph") == 0;
  static double ms[kStepsMost];
  uint64_t memory[64], sum = 0;
  for (int i = 0; i < blocks; ++i) {
    memory[i] = on_device(bytes);
    check("cuMemsetD8", ((int (*)(uint64_t, unsigned char, size_t))need("cuMemsetD8_v2"))(memory[i], 0, bytes));
  }
  check("cuCtxSynchronize", ((int (*)(void))need("cuCtxSynchronize"))());
  void* const executable = is_graph ? graph_of(blocks, memory, bytes, stream) : NULL;
  int (*launch_graph)(void*, void*);
  *(void**)&launch_graph = need("cuGraphLaunch");
  printf("ready\n");
  fflush(stdout);
  char byte = 0;
  (void)!read(STDIN_FILENO, &byte, 1);
  int done = 0;
  for (; done < kStepsMost && (steps > 0 ? done < steps : !input_ended()); ++done) {
    const int64_t began_ns = now_ns();
    if (is_graph) check("cuGraphLaunch", launch_graph(executable, stream));
    for (int i = 0; i < blocks && !is_graph; ++i) change(memory[i], bytes, (uint64_t)done, stream);
    check("cuStreamSynchronize", synchronize(stream));
    ms[done] = (double)(now_ns() - began_ns) / 1e6;
    usleep(pause_us);
  }
  const int64_t ended_ns = now_ns();
  for (int i = 0; i < blocks && strcmp(how, "unsummed") != 0; ++i) sum = sum * 31 + sum_of(memory[i], bytes, stream);
  printf("{\"sum\": %llu, \"ended_ms\": %.4f, \"ms\": [", (unsigned long long)sum, (double)ended_ns / 1e6);
  for (int i = 0; i < done; ++i) printf("%s%.4f", i == 0 ? "" : ", ", ms[i]);
  printf("]}\n");
  fflush(stdout);
  while (steps > 0 && read(STDIN_FILENO, &byte, 1) > 0) continue;
  return 0;
}

static int ask(size_t bytes, size_t left) {
  const size_t all = free_bytes();
  if (all > left) on_device(all - left);
  printf("ready\n");
  fflush(stdout);
  uint64_t memory = 0;
  char line[16];
  while (fgets(line, sizeof line, stdin) != NULL) {
    const int64_t began_ns = now_ns();
    if (memory != 0) {
      free_on_device(memory);
      memory = 0;
      while (free_bytes() > left + (bytes - left) / 2) {
        check("waiting for others to take the memory", now_ns() - began_ns > kPatienceNs);
        usleep(1000);
      }
    } else {
      memory = on_device(bytes);
    }
    printf("%.4f\n", (double)(now_ns() - began_ns) / 1e6);
    fflush(stdout);
  }
  return 0;
}

static int allocate(void) {
  static const size_t kMib[] = {2, 20, 32, 256, 2048};
  const int sizes = simulated ? 3 : 5;
  for (int size = 0; size < sizes; ++size) {
    double us[kTimes];
    for (int i = 0; i < kTimes; ++i) {
      const int64_t began_ns = now_ns();
      free_on_device(on_device(kMib[size] << 20));
      us[i] = (double)(now_ns() - began_ns) / 1e3;
    }
    printf("%s%.3f", size == 0 ? "[" : ", ", median(us, kTimes));
  }
  printf("]\n");
  return 0;
}

int main(int argc, char** argv) {
  const char* const what = argc > 1 ? argv[1] : "";
  const struct {
    const char* name;
    int arguments;
  } programs[] = {{"serve", 3}, {"copy", 1}, {"rate", 1}, {"train", 5}, {"need", 2}, {"allocate", 0}, {"free", 0}};
  size_t which = 0;
  while (which < 7 && (strcmp(programs[which].name, what) != 0 || programs[which].arguments != argc - 2)) ++which;
  if (which == 7) {
    fprintf(stderr, "copies: usage: copies serve|copy|rate|train|need|allocate|free ARGUMENTS...; see its source\n");
    return 2;
  }
  open_driver();
  *(void**)&to_device = need("cuMemcpyHtoDAsync_v2");
  *(void**)&to_host = need("cuMemcpyDtoHAsync_v2");
  *(void**)&synchronize = need("cuStreamSynchronize");
  const char* const image = getenv("COPIES_IMAGE");
  void *module = NULL, *stream = NULL;
  simulated = image != NULL && strcmp(image, "simulated") == 0;
  start(simulated ? kSimulated : kPtx, &module, &stream);
  *(void**)&launch = need("cuLaunchKernel");
  spin = function_of(module, "spin");
  append = function_of(module, "append");
  launch_for(1, stream);
  check("cuStreamSynchronize", synchronize(stream));
  const size_t bytes = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
  switch (which) {
    case 0:
      return serve(stream, atof(argv[2]), atof(argv[3]), atol(argv[4]));
    case 1:
      return copy(bytes);
    case 2:
      return rate(stream, bytes);
    case 3:
      return train(stream, atoi(argv[2]), strtoull(argv[3], NULL, 10), atoi(argv[4]), (unsigned)atoi(argv[5]), argv[6]);
    case 4:
      return ask(bytes, strtoull(argv[3], NULL, 10));
    case 5:
      return allocate();
    default:
      printf("%zu\n", free_bytes());
      return 0;
  }
}
