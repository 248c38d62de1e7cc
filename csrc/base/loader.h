/* The C library's own dlsym. Another library in the process may export a dlsym that answers for every "cu..." function
 * with its own (HAMi-core does, to limit a program's resources). A look-up of the real driver's functions must not get
 * those: they lead back to the driver's name, which is ours, and round for ever. Plain C, needs libc alone, because the
 * shim links it too. Any thread. */
#ifndef CUDASCHED_BASE_LOADER_H_
#define CUDASCHED_BASE_LOADER_H_

#ifdef __cplusplus
extern "C" {
#endif

/* As dlsym, for a handle that dlopen gave; not for RTLD_NEXT, which goes by its caller. */
void* cudasched_loader_find(void* handle, const char* name);

#ifdef __cplusplus
}
#endif

#endif
