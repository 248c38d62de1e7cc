/* Where the real CUDA driver is. Used by the shim, which opens it, and by libcudasched.so, which tells Python. Plain C,
 * needs libc alone, allocates nothing, opens no library: candidates are read as files, never loaded. Any thread may
 * call it. */
#ifndef CUDASCHED_HOOK_FIND_DRIVER_H_
#define CUDASCHED_HOOK_FIND_DRIVER_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Returns 0 and writes the driver's absolute path into `path`; or returns -1 and writes into `why`, cut to fit, the
 * searched places, the refused files and the remedy.
 *
 * CUDASCHED_DRIVER decides alone if it is set: it must name an ELF shared object for this processor. Otherwise
 * libcuda.so.1 is looked for in the directories of LD_LIBRARY_PATH, in /etc/ld.so.cache, then in the usual directories.
 * Skipped are libraries for another processor, cudasched's own shims (this library or another copy), libraries that
 * only lead to another libcuda.so.1, and the CUDA toolkit's link-time stubs. A program that runs with another user's
 * rights (setuid) gets no say: both variables are then ignored. */
int cudasched_hook_find_driver(char* path, size_t path_bytes, char* why, size_t why_bytes);

#ifdef __cplusplus
}
#endif

#endif
