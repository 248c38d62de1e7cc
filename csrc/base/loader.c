#define _GNU_SOURCE
#include "base/loader.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>

/* glibc's alone. A program of another C library, into which the shim may be preloaded, starts without it. */
#pragma weak dlvsym

typedef void* find_function(void* handle, const char* name);

/* By handle, not by name: a library that stands in front of dlsym is found first in every search by name. */
static find_function* c_library_dlsym(void) {
  static const struct {
    const char* library;
    const char* version;
  } kPlaces[] = {{"libc.so.6", "GLIBC_2.34"}, {"libdl.so.2", "GLIBC_2.2.5"}};
  if (dlvsym == NULL) return dlsym;
  for (size_t i = 0; i < sizeof kPlaces / sizeof kPlaces[0]; ++i) {
    void* library = dlopen(kPlaces[i].library, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) continue;
    find_function* found;
    *(void**)&found = dlvsym(library, "dlsym", kPlaces[i].version);
    dlclose(library); /* it stays: this was one more reference */
    if (found != NULL) return found;
  }
  return dlsym;
}

void* cudasched_loader_find(void* handle, const char* name) {
  static _Atomic(find_function*) known;
  find_function* find = atomic_load_explicit(&known, memory_order_relaxed);
  if (find == NULL) {
    find = c_library_dlsym();
    atomic_store_explicit(&known, find, memory_order_relaxed);
  }
  return find(handle, name);
}
