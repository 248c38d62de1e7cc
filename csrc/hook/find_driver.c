#define _GNU_SOURCE
#include "hook/find_driver.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hook/find_driver_internal.h"

static const char kSoname[] = "libcuda.so.1";
/* What the shim's own processor is called, in words, in directories, in ELF files, and in the cache of ld.so beside
 * "libc 6". */
#if defined(__x86_64__)
#define PROCESSOR "x86-64"
#define TRIPLET "x86_64-linux-gnu"
enum { kMachine = EM_X86_64, kCacheFlags = 0x0303 };
#else
#define PROCESSOR "arm64"
#define TRIPLET "aarch64-linux-gnu"
enum { kMachine = EM_AARCH64, kCacheFlags = 0x0a03 };
#endif
static const char kShimMark[] = "cudasched_shim_version";

/* ---- bytes of a file ------------------------------------------------------------------------------------------- */

static bool in_bounds(size_t size, uint64_t offset, uint64_t length) {
  return offset <= size && length <= size - offset;
}

/* The string at `offset`, or null if it has no end within the bytes. */
static const char* string_at(const unsigned char* bytes, size_t size, uint64_t offset) {
  if (offset >= size || memchr(bytes + offset, '\0', size - offset) == NULL) return NULL;
  return (const char*)bytes + offset;
}

static uint32_t read_u32(const unsigned char* bytes) {
  uint32_t value;
  memcpy(&value, bytes, sizeof value);
  return value;
}

struct mapping {
  const unsigned char* bytes;
  size_t size;
};

/* Returns 0 or an errno value. An empty file or something that is no file is EINVAL. */
static int map_file(const char* path, struct mapping* file) {
  const int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return errno;
  int error = EINVAL;
  struct stat status;
  if (fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0) {
    file->size = (size_t)status.st_size;
    void* bytes = mmap(NULL, file->size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    error = bytes == MAP_FAILED ? errno : 0;
    file->bytes = bytes;
  }
  close(descriptor);
  return error;
}

static void unmap_file(const struct mapping* file) { munmap((void*)file->bytes, file->size); }

/* ---- ELF ------------------------------------------------------------------------------------------------------- */

/* The program header at `index` of a file whose header table has been checked. */
static Elf64_Phdr program_header(const unsigned char* bytes, const Elf64_Ehdr* header, unsigned index) {
  Elf64_Phdr entry;
  memcpy(&entry, bytes + header->e_phoff + (size_t)index * sizeof entry, sizeof entry);
  return entry;
}

/* Where the loader would find `address` in the file; SIZE_MAX if no segment holds it. */
static uint64_t file_offset(const unsigned char* bytes, const Elf64_Ehdr* header, uint64_t address) {
  for (unsigned i = 0; i < header->e_phnum; ++i) {
    const Elf64_Phdr segment = program_header(bytes, header, i);
    if (segment.p_type == PT_LOAD && address >= segment.p_vaddr && address - segment.p_vaddr < segment.p_filesz) {
      return segment.p_offset + (address - segment.p_vaddr);
    }
  }
  return SIZE_MAX;
}

enum cudasched_hook_library cudasched_hook_inspect_elf(const unsigned char* bytes, size_t size) {
  Elf64_Ehdr header;
  if (size < EI_NIDENT || memcmp(bytes, ELFMAG, SELFMAG) != 0) return kLibraryNotElf;
  if (bytes[EI_CLASS] != ELFCLASS64 || bytes[EI_DATA] != ELFDATA2LSB) return kLibraryOtherProcessor;
  if (size < sizeof header) return kLibraryDamaged;
  memcpy(&header, bytes, sizeof header);
  if (header.e_machine != kMachine) return kLibraryOtherProcessor;
  if (header.e_type != ET_DYN) return kLibraryNotShared;
  if (header.e_phentsize != sizeof(Elf64_Phdr) ||
      !in_bounds(size, header.e_phoff, (uint64_t)header.e_phnum * sizeof(Elf64_Phdr))) {
    return kLibraryDamaged;
  }

  Elf64_Phdr dynamic = {0};
  for (unsigned i = 0; i < header.e_phnum; ++i) {
    const Elf64_Phdr segment = program_header(bytes, &header, i);
    if (segment.p_type == PT_DYNAMIC) dynamic = segment;
  }
  if (dynamic.p_type != PT_DYNAMIC || !in_bounds(size, dynamic.p_offset, dynamic.p_filesz)) return kLibraryDamaged;

  const uint64_t entries = dynamic.p_filesz / sizeof(Elf64_Dyn);
  const unsigned char* first = bytes + dynamic.p_offset;
  uint64_t strings_address = 0;
  uint64_t strings_size = 0;
  for (uint64_t i = 0; i < entries; ++i) {
    Elf64_Dyn entry;
    memcpy(&entry, first + i * sizeof entry, sizeof entry);
    if (entry.d_tag == DT_NULL) break;
    if (entry.d_tag == DT_STRTAB) strings_address = entry.d_un.d_ptr;
    if (entry.d_tag == DT_STRSZ) strings_size = entry.d_un.d_val;
    if (entry.d_tag == DT_FLAGS_1 && (entry.d_un.d_val & DF_1_PIE) != 0) return kLibraryNotShared;
  }
  const uint64_t strings_offset = file_offset(bytes, &header, strings_address);
  if (strings_size == 0 || !in_bounds(size, strings_offset, strings_size)) return kLibraryDamaged;
  const unsigned char* strings = bytes + strings_offset;

  if (memmem(strings, strings_size, kShimMark, sizeof kShimMark) != NULL) return kLibraryShim;
  for (uint64_t i = 0; i < entries; ++i) {
    Elf64_Dyn entry;
    memcpy(&entry, first + i * sizeof entry, sizeof entry);
    if (entry.d_tag == DT_NULL) break;
    if (entry.d_tag != DT_NEEDED) continue;
    const char* needed = string_at(strings, strings_size, entry.d_un.d_val);
    if (needed != NULL && strcmp(needed, kSoname) == 0) return kLibraryForwarder;
  }
  return kLibraryUsable;
}

/* ---- ld.so.cache ----------------------------------------------------------------------------------------------- */

/* Sizes and offsets of glibc's cache, format 1.1 (strings are offsets from its header) and the older one before it. */
enum {
  kOldHeaderBytes = 16,
  kOldCountAt = 12,
  kOldEntryBytes = 12,
  kHeaderBytes = 48,
  kCountAt = 20,
  kByteOrderAt = 28,
  kEntryBytes = 24,
  kEntryNameAt = 4,
  kEntryPathAt = 8,
  kEntryHwcapAt = 16,
  kCacheAlignment = 8
};
static const char kOldMagic[] = "ld.so-1.7.0";
static const char kMagic[] = "glibc-ld.so.cache1.1";

bool cudasched_hook_scan_cache(const unsigned char* bytes, size_t size, const char* soname,
                               bool (*visit)(const char* path, void* context), void* context) {
  if (size >= kOldHeaderBytes && memcmp(bytes, kOldMagic, sizeof kOldMagic - 1) == 0) {
    const uint64_t end = kOldHeaderBytes + (uint64_t)read_u32(bytes + kOldCountAt) * kOldEntryBytes;
    const uint64_t skip = (end + kCacheAlignment - 1) / kCacheAlignment * kCacheAlignment;
    if (skip > size) return false;
    bytes += skip;
    size -= skip;
  }
  if (size < kHeaderBytes || memcmp(bytes, kMagic, sizeof kMagic - 1) != 0) return false;
  const unsigned byte_order = bytes[kByteOrderAt] & 3;
  if (byte_order != 0 && byte_order != 2) return false; /* 0: unknown, from before glibc 2.32; 2: little-endian */
  const uint64_t count = read_u32(bytes + kCountAt);
  if (!in_bounds(size, kHeaderBytes, count * kEntryBytes)) return false;

  for (uint64_t i = 0; i < count; ++i) {
    const unsigned char* entry = bytes + kHeaderBytes + i * kEntryBytes;
    uint64_t hwcap;
    memcpy(&hwcap, entry + kEntryHwcapAt, sizeof hwcap);
    if (read_u32(entry) != kCacheFlags || hwcap != 0) continue; /* a hwcap copy may need a newer processor */
    const char* name = string_at(bytes, size, read_u32(entry + kEntryNameAt));
    if (name == NULL || strcmp(name, soname) != 0) continue;
    const char* path = string_at(bytes, size, read_u32(entry + kEntryPathAt));
    if (path != NULL && path[0] == '/' && visit(path, context)) break;
  }
  return true;
}

/* ---- the search ------------------------------------------------------------------------------------------------ */

struct search {
  char* path;
  size_t path_bytes;
  char* why;
  size_t why_bytes;
  size_t why_length;
};

__attribute__((format(printf, 2, 3))) static void explain(struct search* search, const char* format, ...) {
  if (search->why_length + 1 >= search->why_bytes) return;
  va_list arguments;
  va_start(arguments, format);
  const size_t room = search->why_bytes - search->why_length;
  const int length = vsnprintf(search->why + search->why_length, room, format, arguments);
  va_end(arguments);
  if (length > 0) search->why_length += (size_t)length < room ? (size_t)length : room - 1;
}

static const char* description(enum cudasched_hook_library kind) {
  switch (kind) {
    case kLibraryUsable:
      return "usable";
    case kLibraryMissing:
      return "no such file";
    case kLibraryUnreadable:
      return "cannot be read";
    case kLibraryNotElf:
      return "not an ELF file";
    case kLibraryOtherProcessor:
      return "not for " PROCESSOR;
    case kLibraryNotShared:
      return "not a shared object";
    case kLibraryDamaged:
      return "a damaged ELF file";
    case kLibraryShim:
      return "a cudasched shim";
    case kLibraryForwarder:
      return "needs another libcuda.so.1";
    case kLibraryLinkStub:
      return "a stub for linking";
    case kLibraryPathTooLong:
      return "its path is too long";
  }
  return "unknown";
}

static enum cudasched_hook_library inspect_file(const char* path) {
  struct mapping file;
  const int error = map_file(path, &file);
  if (error == ENOENT || error == ENOTDIR) return kLibraryMissing;
  if (error != 0) return kLibraryUnreadable;
  const enum cudasched_hook_library kind = cudasched_hook_inspect_elf(file.bytes, file.size);
  unmap_file(&file);
  return kind;
}

/* Takes the candidate as the answer if it is a driver: its absolute path then is in search->path. */
static enum cudasched_hook_library take(struct search* search, const char* candidate) {
  const enum cudasched_hook_library kind = inspect_file(candidate);
  if (kind != kLibraryUsable) return kind;
  char* const absolute = candidate[0] == '/' ? NULL : realpath(candidate, NULL);
  if (candidate[0] != '/' && absolute == NULL) return kLibraryUnreadable;
  const char* const path = absolute == NULL ? candidate : absolute;
  const size_t length = strlen(path);
  const bool fits = length < search->path_bytes;
  if (fits) memcpy(search->path, path, length + 1);
  free(absolute);
  return fits ? kLibraryUsable : kLibraryPathTooLong;
}

/* One candidate of a search: refused ones are noted, missing ones are not worth a word. */
static bool consider(const char* candidate, void* context) {
  struct search* search = context;
  char* const resolved = realpath(candidate, NULL);
  const bool is_stub = resolved != NULL && strstr(resolved, "/stubs/") != NULL;
  free(resolved);
  const enum cudasched_hook_library kind = is_stub ? kLibraryLinkStub : take(search, candidate);
  if (kind != kLibraryUsable && kind != kLibraryMissing) {
    explain(search, " (%s: %s)", candidate, description(kind));
  }
  return kind == kLibraryUsable;
}

static bool consider_directory(struct search* search, const char* directory, size_t length) {
  char candidate[PATH_MAX];
  if (length == 0) {
    directory = "."; /* an empty element of LD_LIBRARY_PATH is the working directory */
    length = 1;
  }
  const int needed = snprintf(candidate, sizeof candidate, "%.*s/%s", (int)length, directory, kSoname);
  return needed > 0 && (size_t)needed < sizeof candidate && consider(candidate, search);
}

static bool consider_library_path(struct search* search, const char* list) {
  while (true) {
    const size_t length = strcspn(list, ":;");
    if (length < PATH_MAX && consider_directory(search, list, length)) return true;
    if (list[length] == '\0') return false;
    list += length + 1;
  }
}

struct cache_visit {
  struct search* search;
  bool found;
};

static bool consider_cached(const char* path, void* context) {
  struct cache_visit* visit = context;
  visit->found = consider(path, visit->search);
  return visit->found;
}

static bool consider_cache(struct search* search, const char* cache) {
  struct mapping file;
  if (map_file(cache, &file) != 0) return false;
  struct cache_visit visit = {search, false};
  if (!cudasched_hook_scan_cache(file.bytes, file.size, kSoname, consider_cached, &visit)) {
    explain(search, " (damaged, or in an unknown format)");
  }
  unmap_file(&file);
  return visit.found;
}

/* Goes through the places in order and says in `why` where it is, for the case that nothing comes of it. */
static bool consider_places(struct search* search, const struct cudasched_hook_places* places) {
  const char* separator = "";
  if (places->library_path != NULL && places->library_path[0] != '\0') {
    explain(search, " LD_LIBRARY_PATH=%s", places->library_path);
    separator = ",";
    if (consider_library_path(search, places->library_path)) return true;
  }
  if (places->cache != NULL) {
    explain(search, "%s %s", separator, places->cache);
    separator = ",";
    if (consider_cache(search, places->cache)) return true;
  }
  for (const char* const* directory = places->directories; directory != NULL && *directory != NULL; ++directory) {
    explain(search, "%s %s", separator, *directory);
    separator = ",";
    if (consider_directory(search, *directory, strlen(*directory))) return true;
  }
  return false;
}

int cudasched_hook_search(const struct cudasched_hook_places* places, char* path, size_t path_bytes, char* why,
                          size_t why_bytes) {
  struct search search = {path, path_bytes, why, why_bytes, 0};
  bool found;
  if (places->driver != NULL && places->driver[0] != '\0') {
    const enum cudasched_hook_library kind = take(&search, places->driver);
    found = kind == kLibraryUsable;
    explain(&search,
            "CUDASCHED_DRIVER=%s: %s. It must name the driver's " PROCESSOR " libcuda.so.1; unset it to search.",
            places->driver, description(kind));
  } else {
    explain(&search, "no NVIDIA driver found (libcuda.so.1 for " PROCESSOR
                     "): install one, or set CUDASCHED_DRIVER to the path of one. "
                     "Looked in");
    found = consider_places(&search, places);
  }
  if (found && why_bytes > 0) why[0] = '\0';
  return found ? 0 : -1;
}

int cudasched_hook_find_driver(char* path, size_t path_bytes, char* why, size_t why_bytes) {
  static const char* const kDirectories[] = {
      "/lib/" TRIPLET,
      "/usr/lib/" TRIPLET,
      "/lib64",
      "/usr/lib64",
      "/lib",
      "/usr/lib",
      "/usr/local/nvidia/lib64",
#if defined(__x86_64__)
      "/usr/lib/wsl/lib",
#else
      "/usr/lib/" TRIPLET "/nvidia",
      "/usr/lib/" TRIPLET "/tegra", /* JetPack 6 and later, and before */
#endif
      NULL,
  };
  const struct cudasched_hook_places places = {
      .driver = secure_getenv("CUDASCHED_DRIVER"),
      .library_path = secure_getenv("LD_LIBRARY_PATH"),
      .cache = "/etc/ld.so.cache",
      .directories = kDirectories,
  };
  return cudasched_hook_search(&places, path, path_bytes, why, why_bytes);
}
