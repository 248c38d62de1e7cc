/* What the benchmarks' C programs share: the driver, which is opened at run time, whichever libcuda.so.1 the loader
 * finds; they link nothing. They define _GNU_SOURCE, for the clocks. PROGRAM is the program's name, for messages.
 * Whatever fails ends the program with status 2.
 */
#ifndef CUDASCHED_BENCHMARKS_C_PROGRAM_H_
#define CUDASCHED_BENCHMARKS_C_PROGRAM_H_

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void* library;

static int64_t read_ns(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}
static int64_t now_ns(void) { return read_ns(CLOCK_MONOTONIC); }

static void* need(const char* name) {
  void* function = dlsym(library, name);
  if (function == NULL) {
    fprintf(stderr, PROGRAM ": the driver has no %s\n", name);
    exit(2);
  }
  return function;
}

static void check(const char* call, int status) {
  if (status != 0) {
    fprintf(stderr, PROGRAM ": %s failed with status %d\n", call, status);
    exit(2);
  }
}

static void open_driver(void) {
  library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) {
    fprintf(stderr, PROGRAM ": %s\n", dlerror());
    exit(2);
  }
}

/* The first GPU's primary context, current; a module of the kernels of `image`; and a non-blocking stream. */
static void start(const char* image, void** module, void** stream) {
  int device = 0;
  void* context = NULL;
  check("cuInit", ((int (*)(unsigned))need("cuInit"))(0));
  check("cuDeviceGet", ((int (*)(int*, int))need("cuDeviceGet"))(&device, 0));
  check("cuDevicePrimaryCtxRetain", ((int (*)(void**, int))need("cuDevicePrimaryCtxRetain"))(&context, device));
  check("cuCtxSetCurrent", ((int (*)(void*))need("cuCtxSetCurrent"))(context));
  check("cuModuleLoadData", ((int (*)(void**, const void*))need("cuModuleLoadData"))(module, image));
  check("cuStreamCreate", ((int (*)(void**, unsigned))need("cuStreamCreate"))(stream, 1));
}

static void* function_of(void* module, const char* name) {
  void* function = NULL;
  check("cuModuleGetFunction",
        ((int (*)(void**, void*, const char*))need("cuModuleGetFunction"))(&function, module, name));
  return function;
}

#endif
