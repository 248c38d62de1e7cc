/* The parts of find_driver.c, apart, for its tests. The two parsers read bytes that any user may have written: they
 * touch nothing outside [bytes, bytes + size) for any content, and need no alignment. */
#ifndef CUDASCHED_HOOK_FIND_DRIVER_INTERNAL_H_
#define CUDASCHED_HOOK_FIND_DRIVER_INTERNAL_H_

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum cudasched_hook_library {
  kLibraryUsable = 0,
  kLibraryMissing,
  kLibraryUnreadable,
  kLibraryNotElf,
  kLibraryOtherProcessor,
  kLibraryNotShared,
  kLibraryDamaged,
  kLibraryShim,      /* exports cudasched_shim_version */
  kLibraryForwarder, /* needs libcuda.so.1 itself, as our libcuda.so does */
  kLibraryLinkStub,  /* is in a directory named stubs */
  kLibraryPathTooLong
};

/* What kind of library the file with these bytes is. */
enum cudasched_hook_library cudasched_hook_inspect_elf(const unsigned char* bytes, size_t size);

/* Calls visit with the path of each entry of this processor for `soname`, in the cache's order, until it returns true.
 * Returns false if the bytes are no cache of a format known here; an entry that points outside the cache is passed
 * over. Both layouts of glibc's format 1.1 are read: alone, and behind the older ld.so-1.7.0. */
bool cudasched_hook_scan_cache(const unsigned char* bytes, size_t size, const char* soname,
                               bool (*visit)(const char* path, void* context), void* context);

/* Where to search. Null members are left out. */
struct cudasched_hook_places {
  const char* driver;             /* CUDASCHED_DRIVER */
  const char* library_path;       /* LD_LIBRARY_PATH */
  const char* cache;              /* path of ld.so.cache */
  const char* const* directories; /* ended by a null pointer */
};

int cudasched_hook_search(const struct cudasched_hook_places* places, char* path, size_t path_bytes, char* why,
                          size_t why_bytes);

#ifdef __cplusplus
}
#endif

#endif
