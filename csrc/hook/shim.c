/* libcuda.so.1, cudasched's: every entry point of the driver, each a jump (trampolines.py) through a table that this
 * file fills. Loading it looks one function up; it needs libc alone. The program's first cu* call, on any thread, opens
 * the real driver and then libcudasched.so, which may take over some entry points (include/cudasched/engine.h); every
 * other slot is filled from the real driver when it is first called. Whatever goes wrong with libcudasched.so is said
 * in one line, and every call passes through.
 *
 * Without a driver nothing fails but the calls: cuInit returns CUDA_ERROR_NO_DEVICE, cuGetErrorName and
 * cuGetErrorString know the codes that can come up, everything else returns CUDA_ERROR_NOT_INITIALIZED. A function that
 * the real driver lacks returns CUDA_ERROR_NOT_SUPPORTED. None of these touches any other argument.
 *
 * No lock is held while a call is under way. One thread attaches, others wait for it; see settle().
 *
 * At the process's end, by exit() or, where the shim is preloaded or linked, by _exit(), it says so if the program went
 * past it: if a real driver is mapped and no call came here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/loader.h"
#include "base/switch.h"
#include "cudasched/engine.h"
#include "hook/find_driver.h"
#include "symbol_names.h"

/* Written here, read by the trampolines' jumps: one aligned word each. */
extern _Atomic(void*) cudasched_hook_table[kSymbolCount];

/* Addresses in trampolines.S. */
extern const char cudasched_hook_entries_begin[], cudasched_hook_entries_end[];
extern const char cudasched_hook_lazy_begin[], cudasched_hook_lazy_end[];

void* cudasched_hook_resolve(uint32_t index);

CUDASCHED_EXPORT const char* cudasched_shim_version(void) { return CUDASCHED_VERSION; }

static bool lies_between(const void* address, const char* begin, const char* end) {
  return (uintptr_t)address >= (uintptr_t)begin && (uintptr_t)address < (uintptr_t)end;
}

/* Without the signals of a failed write, which would end the program, as base/undisturbed.hpp. */
static void write_quietly(int file, const char* text, size_t length) {
  sigset_t own, pending, before;
  sigemptyset(&own);
  sigemptyset(&pending);
  sigpending(&pending);
  if (sigismember(&pending, SIGPIPE) == 0) sigaddset(&own, SIGPIPE);
  if (sigismember(&pending, SIGXFSZ) == 0) sigaddset(&own, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &own, &before);
  const ssize_t ignored = write(file, text, length);
  (void)ignored;
  while (sigtimedwait(&own, NULL, &(struct timespec){0}) > 0) {
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

enum { kWarningBytes = 4096 };

/* A line like those of base/log.hpp, which the shim cannot link. `line` has kWarningBytes. */
static void warn_in(char* line, const char* format, va_list arguments) {
  const char* level = getenv("CUDASCHED_LOG");
  if (level != NULL && strcmp(level, "error") == 0) return;
  static const char kBegin[] = "cudasched: warning: ";
  size_t length = sizeof kBegin - 1;
  memcpy(line, kBegin, sizeof kBegin);
  if (vsnprintf(line + length, kWarningBytes - length - 1, format, arguments) < 0) return;
  length = strlen(line);
  line[length++] = '\n';
  write_quietly(STDERR_FILENO, line, length);
}

__attribute__((format(printf, 1, 2))) static void warn(const char* format, ...) {
  char line[kWarningBytes];
  va_list arguments;
  va_start(arguments, format);
  warn_in(line, format, arguments);
  va_end(arguments);
}

/* ---- where no driver answers ------------------------------------------------------------------------------------- */

/* As in cuda.h, which the shim does not need otherwise. */
enum { kSuccess = 0, kInvalidValue = 1, kNotInitialized = 3, kNoDevice = 100, kNotSupported = 801 };

static const struct {
  int code;
  const char* name;
  const char* text;
} kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

static int error_name(int code, const char** name) {
  if (name == NULL) return kInvalidValue;
  *name = NULL;
  for (size_t i = 0; i < sizeof kErrors / sizeof kErrors[0]; ++i) {
    if (kErrors[i].code == code) *name = kErrors[i].name;
  }
  return *name != NULL ? kSuccess : kInvalidValue;
}

static int error_string(int code, const char** text) {
  if (text == NULL) return kInvalidValue;
  *text = NULL;
  for (size_t i = 0; i < sizeof kErrors / sizeof kErrors[0]; ++i) {
    if (kErrors[i].code == code) *text = kErrors[i].text;
  }
  return *text != NULL ? kSuccess : kInvalidValue;
}

static int no_device(void) { return kNoDevice; }
static int not_initialized(void) { return kNotInitialized; }
static int not_supported(void) { return kNotSupported; }

static void* without_driver(const char* name) {
  if (strcmp(name, "cuInit") == 0) return (void*)no_device;
  if (strcmp(name, "cuGetErrorName") == 0) return (void*)error_name;
  if (strcmp(name, "cuGetErrorString") == 0) return (void*)error_string;
  return (void*)not_initialized;
}

/* ---- the real driver --------------------------------------------------------------------------------------------- */

struct driver {
  void* handle; /* null: there is none */
  char path[PATH_MAX];
};

static void open_driver(struct driver* driver, bool say_why_not) {
  char why[2048];
  driver->handle = NULL;
  if (cudasched_hook_find_driver(driver->path, sizeof driver->path, why, sizeof why) == 0) {
    driver->handle = dlopen(driver->path, RTLD_NOW | RTLD_LOCAL);
    if (driver->handle == NULL) snprintf(why, sizeof why, "cannot load the driver: %s", dlerror());
  }
  if (driver->handle == NULL && say_why_not) warn("%s (cuInit returns CUDA_ERROR_NO_DEVICE)", why);
}

static void* driver_function(void* handle, uint32_t index) {
  const char* name = cudasched_hook_names[index];
  if (handle == NULL) return without_driver(name);
  void* function = cudasched_loader_find(handle, name);
  /* A driver that needs libcuda.so.1 itself would lead back here, and round for ever. */
  if (function == NULL || lies_between(function, cudasched_hook_entries_begin, cudasched_hook_entries_end)) {
    return (void*)not_supported;
  }
  return function;
}

/* ---- libcudasched.so --------------------------------------------------------------------------------------------- */

static int compare_name(const void* name, const void* entry) { return strcmp(name, *(const char* const*)entry); }

static void take_over(const struct cudasched_override* overrides) {
  for (; overrides != NULL && overrides->symbol != NULL; ++overrides) {
    const char* const* found =
        bsearch(overrides->symbol, cudasched_hook_names, kSymbolCount, sizeof cudasched_hook_names[0], compare_name);
    if (found == NULL || overrides->function == NULL) continue;
    atomic_store_explicit(&cudasched_hook_table[found - cudasched_hook_names], overrides->function,
                          memory_order_release);
  }
}

/* libcudasched.so is in the directory above the shim's own, through any link that loaded the shim. */
static bool engine_path(char* path, size_t bytes) {
  Dl_info self;
  if (bytes < PATH_MAX || dladdr((const void*)cudasched_hook_entries_begin, &self) == 0) return false;
  if (self.dli_fname == NULL || realpath(self.dli_fname, path) == NULL) return false;
  for (int level = 0; level < 2; ++level) {
    char* slash = strrchr(path, '/');
    if (slash == NULL) return false;
    *slash = '\0';
  }
  const size_t home = strlen(path);
  const int length = snprintf(path + home, bytes - home, "/libcudasched.so");
  return length > 0 && (size_t)length < bytes - home;
}

/* The engine's cudasched_finish, once it is attached. */
static _Atomic(__typeof__(&cudasched_finish)) finish_engine;

static void attach_engine(const struct driver* driver) {
  if (cudasched_switch(getenv("CUDASCHED_OFF")) == 1) return;
  static char path[PATH_MAX];
  if (!engine_path(path, sizeof path)) {
    warn("the shim cannot tell where it was loaded from, so libcudasched.so is not loaded: every call passes through");
    return;
  }
  void* engine = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (engine == NULL) {
    warn("cannot load libcudasched.so (%s): every call passes through", dlerror());
    return;
  }
  __typeof__(&cudasched_attach) attach;
  *(void**)&attach = cudasched_loader_find(engine, "cudasched_attach");
  if (attach == NULL) {
    warn("%s is not cudasched's engine (it has no cudasched_attach): every call passes through", path);
    return;
  }
  take_over(attach(driver->handle, driver->path));
  atomic_store_explicit(&finish_engine, cudasched_loader_find(engine, "cudasched_finish"), memory_order_release);
}

/* ---- the first call ---------------------------------------------------------------------------------------------- */

enum { kSettled = 1, kPatience_ms = 10000 };

/* 0: nothing done; kSettled: real_driver and the overrides stand; else the process (upper half) and thread that attach.
 */
static _Atomic(uint64_t) progress;
static void* real_driver;

/* Returns true once the driver and the overrides are in place, having put them there if no thread had. Returns false
 * where waiting for that would never end: the call comes from inside the attaching itself, or the attaching thread
 * waits for something that this thread holds (the dynamic loader's lock, if a library's constructor makes CUDA calls).
 */
static bool settle_uncancelled(void) {
  const uint64_t process = (uint64_t)(uint32_t)getpid() << 32;
  const uint64_t self = process | (uint32_t)syscall(SYS_gettid);
  uint64_t seen = atomic_load_explicit(&progress, memory_order_acquire);
  for (int waited_ms = 0; seen != kSettled;) {
    if (seen == self) return false;
    if (seen >> 32 == process >> 32) {
      if (waited_ms++ == kPatience_ms) {
        warn("the first CUDA call, on another thread, has not come back in %d s: a call on this thread passes through",
             kPatience_ms / 1000);
        return false;
      }
      nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
      seen = atomic_load_explicit(&progress, memory_order_acquire);
      continue;
    }
    /* No thread has begun, or the thread that had begun was left behind in the parent of a fork. */
    if (atomic_compare_exchange_weak_explicit(&progress, &seen, self, memory_order_acquire, memory_order_acquire)) {
      static struct driver driver;
      open_driver(&driver, true);
      real_driver = driver.handle;
      if (driver.handle != NULL) attach_engine(&driver);
      atomic_store_explicit(&progress, kSettled, memory_order_release);
      return true;
    }
  }
  return true;
}

/* A cancelled thread would not come back, and others wait for it. */
static __attribute__((noinline)) bool settle(void) {
  int cancellation;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancellation);
  const bool settled = settle_uncancelled();
  pthread_setcancelstate(cancellation, NULL);
  return settled;
}

/* ---- the end -----------------------------------------------------------------------------------------------------
 * What is called by _exit() may interrupt anything, be in a forked child whose parent's threads held locks, or in the
 * memory of its parent (vfork): it takes no lock, allocates nothing, and reads the kernel's list of libraries, not the
 * loader's. It may be on a signal handler's stack of 8 KiB, so its buffers are not: one thread uses them, once. */

enum { kLineBytes = PATH_MAX + 128 };

static bool ends_with(const char* text, const char* end) {
  const size_t length = strlen(text);
  return length >= strlen(end) && strcmp(text + length - strlen(end), end) == 0;
}

struct mapped {
  char driver[PATH_MAX]; /* a driver that is no shim; empty: there is none */
  char shim[PATH_MAX];
};

static void note_mapped(char* line, struct mapped* found) {
  char* const path = strchr(line, '/');
  if (path == NULL || strlen(path) >= PATH_MAX) return;
  const char* const name = strrchr(path, '/') + 1;
  static const char kName[] = "libcuda.so";
  if (strncmp(name, kName, sizeof kName - 1) != 0) return;
  if (name[strspn(name + sizeof kName - 1, ".0123456789") + sizeof kName - 1] != '\0') return;
  if (ends_with(path, "/hook/libcuda.so") || strstr(path, "/stubs/") != NULL) return;
  strcpy(ends_with(path, "/hook/libcuda.so.1") ? found->shim : found->driver, path);
}

/* `list`: /proc/PID/maps. */
static void read_mapped(const char* list, struct mapped* found) {
  found->driver[0] = found->shim[0] = '\0';
  const int file = open(list, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  static char line[kLineBytes];
  static char bytes[4096];
  size_t length = 0;
  for (ssize_t got; (got = read(file, bytes, sizeof bytes)) > 0;) {
    for (ssize_t i = 0; i < got; ++i) {
      if (bytes[i] != '\n') {
        if (length < sizeof line - 1) line[length++] = bytes[i];
        continue;
      }
      line[length] = '\0';
      length = 0;
      note_mapped(line, found);
    }
  }
  close(file);
}

/* For `cudasched run --check-coverage`, as Lifecycle::write_coverage_report. */
static void report_past(const char* driver) {
  const char* directory = getenv("CUDASCHED_COVERAGE_DIR");
  if (directory == NULL || directory[0] == '\0' || strpbrk(driver, "\"\\") != NULL) return;
  static char text[PATH_MAX + 256];
  if ((size_t)snprintf(text, sizeof text, "%s/coverage-%d.json", directory, (int)getpid()) >= sizeof text) return;
  const int file = open(text, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return;
  const int length = snprintf(text, sizeof text,
                              "{\"pid\": %d, \"name\": \"?\", \"hook_launches\": 0, \"device_launches\": 0, "
                              "\"coverage\": 0, \"error\": \"it opened the driver by its path, %s\"}\n",
                              (int)getpid(), driver);
  write_quietly(file, text, (size_t)length);
  close(file);
}

__attribute__((format(printf, 1, 2))) static void warn_past(const char* format, ...) {
  static char line[kWarningBytes];
  va_list arguments;
  va_start(arguments, format);
  warn_in(line, format, arguments);
  va_end(arguments);
}

/* A program that opened the driver by its path never comes here, so no one else could report it before. */
static void say_if_past(void) {
  static _Atomic(pid_t) looked; /* by this process: a child of vfork() is another */
  const pid_t process = getpid();
  if (atomic_load_explicit(&progress, memory_order_acquire) != 0) return;
  if (atomic_exchange(&looked, process) == process) return;
  if (cudasched_switch(getenv("CUDASCHED_OFF")) == 1) return;
  static struct mapped own, parents;
  read_mapped("/proc/self/maps", &own);
  if (own.driver[0] == '\0') return;
  report_past(own.driver);
  /* Workers that are forked from a process that has opened it: that process says it. */
  char list[64];
  snprintf(list, sizeof list, "/proc/%d/maps", (int)getppid());
  read_mapped(list, &parents);
  if (strcmp(own.driver, parents.driver) == 0) return;
  warn_past(
      "process %d has opened the driver by its path, %s, past cudasched: its launches were not scheduled, and no "
      "memory "
      "limit held for it; let it open libcuda.so.1 by that name, or %s",
      (int)process, own.driver, own.shim[0] != '\0' ? own.shim : "cudasched's hook/libcuda.so.1");
}

static void (*next_exit)(int status);

static __attribute__((noreturn)) void leave(int status) {
  say_if_past();
  const __typeof__(&cudasched_finish) finish = atomic_load_explicit(&finish_engine, memory_order_acquire);
  if (finish != NULL) finish();
  /* A library that has it look functions up may find this one behind itself. */
  if (next_exit != NULL && next_exit != leave) next_exit(status);
  for (;;) syscall(SYS_exit_group, status);
}

/* Exit handlers do not run then, and children of fork that Python's multiprocessing makes end so. */
CUDASCHED_EXPORT void _exit(int status) __attribute__((alias("leave"), noreturn));
CUDASCHED_EXPORT void _Exit(int status) __attribute__((alias("leave"), noreturn));

__attribute__((constructor)) static void find_next_exit(void) { *(void**)&next_exit = dlsym(RTLD_NEXT, "_exit"); }
__attribute__((destructor)) static void at_exit(void) { say_if_past(); }

/* ---- a call --------------------------------------------------------------------------------------------------------
 */

/* With the driver alone, while another call of settle() is under way. */
static __attribute__((noinline)) void* unsettled_function(uint32_t index) {
  struct driver driver;
  open_driver(&driver, false);
  return driver_function(driver.handle, index);
}

/* Where the call of function `index` goes: called by trampolines.S while the slot has not been filled. The thread's
 * stack may be the least one (16 KiB). */
void* cudasched_hook_resolve(uint32_t index) {
  const int saved_errno = errno;
  void* function;
  if (settle()) {
    function = atomic_load_explicit(&cudasched_hook_table[index], memory_order_acquire);
    if (lies_between(function, cudasched_hook_lazy_begin, cudasched_hook_lazy_end)) {
      function = driver_function(real_driver, index);
      atomic_store_explicit(&cudasched_hook_table[index], function, memory_order_release);
    }
  } else {
    function = unsettled_function(index);
  }
  errno = saved_errno;
  return function;
}
