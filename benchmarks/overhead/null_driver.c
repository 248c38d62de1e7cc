/* A libcuda.so.1 whose calls return at once: between a program and this, all that a launch costs is the hook's own.
 * Built at run time together with a generated file that gives every other driver symbol a body that returns success.
 * Handles are small numbers; kernel 1 takes no parameters, kernel 2 takes ten of 8 bytes. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { kSuccess = 0, kInvalidValue = 1, kNotFound = 500 };

static int put(void** where, uintptr_t handle) {
  *where = (void*)handle;
  return kSuccess;
}

int cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
int cuGetErrorName(int status, const char** name) { return (void)status, *name = "CUDA_ERROR", kSuccess; }
int cuGetErrorString(int status, const char** text) { return (void)status, *text = "an error", kSuccess; }
int cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
  (void)symbol, (void)version, (void)flags;
  *function = NULL;
  return kNotFound;
}
int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* status) {
  if (status != NULL) *status = 1;
  return cuGetProcAddress(symbol, function, version, flags);
}
int cuGetExportTable(const void** table, const void* id) { return (void)id, *table = NULL, kNotFound; }

int cuDeviceGet(int* device, int ordinal) { return (void)ordinal, *device = 0, kSuccess; }
int cuDeviceGetCount(int* count) { return *count = 1, kSuccess; }
int cuDeviceGetName(char* name, int length, int device) {
  (void)device;
  return snprintf(name, (size_t)length, "null driver"), kSuccess;
}
int cuDeviceGetUuid(void* uuid, int device) { return (void)device, memset(uuid, 0x4e, 16), kSuccess; }
int cuDeviceGetUuid_v2(void* uuid, int device) { return cuDeviceGetUuid(uuid, device); }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return (void)attribute, (void)device, *value = 132, kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { return (void)device, put(context, 1); }
int cuCtxGetCurrent(void** context) { return put(context, 1); }
int cuCtxPopCurrent_v2(void** context) { return put(context, 1); }
int cuCtxGetDevice(int* device) { return *device = 0, kSuccess; }
int cuCtxGetId(void* context, uint64_t* id) { return (void)context, *id = 1, kSuccess; }
int cuStreamGetId(void* stream, uint64_t* id) { return *id = (uintptr_t)stream, kSuccess; }
int cuStreamGetCtx(void* stream, void** context) { return (void)stream, put(context, 1); }

int cuModuleLoadData(void** module, const void* image) { return (void)image, put(module, 1); }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  return (void)module, put(function, strcmp(name, "ten") == 0 ? 2 : 1);
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  return (void)attribute, (void)function, *value = 32, kSuccess;
}
int cuFuncGetName(const char** name, void* function) { return (void)function, *name = "kernel", kSuccess; }
int cuFuncGetModule(void** module, void* function) { return (void)function, put(module, 1); }
int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  if (function != (void*)2 || index >= 10) return kInvalidValue;
  if (offset != NULL) *offset = 8 * index;
  if (size != NULL) *size = 8;
  return kSuccess;
}
int cuKernelGetParamInfo(void* kernel, size_t index, size_t* offset, size_t* size) {
  return cuFuncGetParamInfo(kernel, index, offset, size);
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t shared_bytes) {
  return (void)function, (void)threads, (void)shared_bytes, *blocks = 8, kSuccess;
}

int cuStreamCreate(void** stream, unsigned flags) { return (void)flags, put(stream, 16); }
int cuStreamIsCapturing(void* stream, int* status) { return (void)stream, *status = 0, kSuccess; }
int cuStreamIsCapturing_ptsz(void* stream, int* status) { return (void)stream, *status = 0, kSuccess; }
int cuEventCreate(void** event, unsigned flags) {
  static uintptr_t next = 100;
  return (void)flags, put(event, __atomic_add_fetch(&next, 1, __ATOMIC_RELAXED));
}
int cuEventElapsedTime(float* ms, void* start, void* end) { return (void)start, (void)end, *ms = 0.002F, kSuccess; }
int cuEventElapsedTime_v2(float* ms, void* start, void* end) { return cuEventElapsedTime(ms, start, end); }
