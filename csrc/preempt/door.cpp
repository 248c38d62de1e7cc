#include "preempt/door.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstring>
#include <span>

#include "base/loader.h"
#include "preempt/groups.hpp"

namespace cudasched::preempt {
namespace {

using Ioctl = int (*)(int, unsigned long, ...);

// Read by every ioctl of the driver; written once, before the first of them.
std::atomic<Ioctl> behind{nullptr};
std::atomic<Groups*> watcher{nullptr};

// In the place of the driver's ioctl. Its errno is the program's.
int watched_ioctl(int descriptor, unsigned long request, ...) noexcept {
  std::va_list arguments;
  va_start(arguments, request);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  Groups& groups = *watcher.load(std::memory_order_acquire);
  groups.note_before(request, argument);
  const int result = behind.load(std::memory_order_acquire)(descriptor, request, argument);
  const int saved_errno = errno;
  groups.note(descriptor, request, argument, result);
  errno = saved_errno;
  return result;
}

// A loaded library: its address, and the part that is read-only after the relocation.
struct Library {
  ElfW(Addr) base = 0;
  ElfW(Addr) read_only = 0;  // beginning of PT_GNU_RELRO,
  ElfW(Addr) read_only_end = 0;
  bool found = false;
};

int describe(dl_phdr_info* info, std::size_t, void* wanted) {
  auto& library = *static_cast<Library*>(wanted);
  if (info->dlpi_addr != library.base) return 0;
  library.found = true;
  for (const ElfW(Phdr) & segment : std::span(info->dlpi_phdr, info->dlpi_phnum)) {
    if (segment.p_type != PT_GNU_RELRO) continue;
    library.read_only = library.base + segment.p_vaddr;
    library.read_only_end = library.read_only + segment.p_memsz;
  }
  return 1;
}

// The words that hold the address of `name` in a library; most have one. Returns how many there are, at most kWords.
constexpr std::size_t kWords = 4;

std::size_t find_words(const link_map& map, const char* name, std::array<void**, kWords>& words) noexcept {
  // glibc has made the addresses of the table absolute, other loaders may not have.
  const auto at = [&](ElfW(Addr) address) { return address < map.l_addr ? address + map.l_addr : address; };
  ElfW(Addr) symbols = 0;
  ElfW(Addr) strings = 0;
  std::array<std::pair<ElfW(Addr), std::size_t>, 2> tables{};  // of relocations
  for (const ElfW(Dyn)* entry = map.l_ld; entry->d_tag != DT_NULL; ++entry) {
    switch (entry->d_tag) {
      case DT_SYMTAB:
        symbols = at(entry->d_un.d_ptr);
        break;
      case DT_STRTAB:
        strings = at(entry->d_un.d_ptr);
        break;
      case DT_JMPREL:
        tables[0].first = at(entry->d_un.d_ptr);
        break;
      case DT_PLTRELSZ:
        tables[0].second = entry->d_un.d_val;
        break;
      case DT_RELA:
        tables[1].first = at(entry->d_un.d_ptr);
        break;
      case DT_RELASZ:
        tables[1].second = entry->d_un.d_val;
        break;
      default:
        break;
    }
  }
  if (symbols == 0 || strings == 0) return 0;
  std::size_t found = 0;
  for (const auto& [address, bytes] : tables) {
    if (address == 0) continue;
    for (const ElfW(Rela) & relocation :
         std::span(reinterpret_cast<const ElfW(Rela)*>(address), bytes / sizeof(ElfW(Rela)))) {
      const auto type = ELF64_R_TYPE(relocation.r_info);
#if defined(__x86_64__)
      if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT) continue;
#else
      if (type != R_AARCH64_JUMP_SLOT && type != R_AARCH64_GLOB_DAT) continue;
#endif
      const auto& symbol = reinterpret_cast<const ElfW(Sym)*>(symbols)[ELF64_R_SYM(relocation.r_info)];
      if (std::strcmp(reinterpret_cast<const char*>(strings) + symbol.st_name, name) != 0) continue;
      if (found < kWords) words[found++] = reinterpret_cast<void**>(map.l_addr + relocation.r_offset);
    }
  }
  return found;
}

bool write_word(void** word, void* value, const Library& library) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(word);
  const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const page = reinterpret_cast<void*>(address & ~(page_bytes - 1));
  const bool read_only = address >= library.read_only && address < library.read_only_end;
  if (read_only && mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
  if (read_only) mprotect(page, page_bytes, PROT_READ);
  return true;
}

}  // namespace

bool Door::watch(void* driver, Groups& groups) noexcept {
  link_map* map = nullptr;
  if (driver == nullptr || dlinfo(driver, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return false;
  Library library{.base = map->l_addr};
  dl_iterate_phdr(&describe, &library);
  std::array<void**, kWords> words{};
  const std::size_t count = library.found ? find_words(*map, "ioctl", words) : 0;
  if (count == 0) return false;
  // The simulated driver contains its kernel module.
  void* real = cudasched_loader_find(driver, "cudasched_simulated_ioctl");
  if (real == nullptr) real = *words[0];
  if (real == nullptr || real == reinterpret_cast<void*>(&watched_ioctl)) return false;
  Ioctl none = nullptr;
  watcher.store(&groups, std::memory_order_release);
  if (!behind.compare_exchange_strong(none, reinterpret_cast<Ioctl>(real), std::memory_order_acq_rel)) return false;
  for (void** const word : std::span(words).first(count)) {
    if (!write_word(word, reinterpret_cast<void*>(&watched_ioctl), library)) return false;
  }
  return true;
}

int Door::call(int descriptor, unsigned long request, void* argument) const noexcept {
  const Ioctl real = behind.load(std::memory_order_acquire);
  if (real != nullptr) return real(descriptor, request, argument);
  errno = ENOSYS;
  return -1;
}

}  // namespace cudasched::preempt
