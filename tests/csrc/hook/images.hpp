// Shared objects and loader caches, built byte by byte, for the tests of the driver search.
#pragma once

#include <elf.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace cudasched::hook::test {

using Bytes = std::vector<unsigned char>;

template <typename T>
void append(Bytes& bytes, const T& value) {
  const auto* first = reinterpret_cast<const unsigned char*>(&value);
  bytes.insert(bytes.end(), first, first + sizeof value);
}

inline void append_text(Bytes& bytes, const std::string& text) { bytes.insert(bytes.end(), text.begin(), text.end()); }

#if defined(__x86_64__)
constexpr std::uint16_t kMachine = EM_X86_64, kOtherMachine = EM_AARCH64;
constexpr std::uint32_t kCacheFlags = 0x0303;  // libc 6 and the processor
constexpr char kProcessor[] = "x86-64";
#else
constexpr std::uint16_t kMachine = EM_AARCH64, kOtherMachine = EM_X86_64;
constexpr std::uint32_t kCacheFlags = 0x0a03;
constexpr char kProcessor[] = "arm64";
#endif

struct Library {
  unsigned char elf_class = ELFCLASS64;
  unsigned char byte_order = ELFDATA2LSB;
  std::uint16_t type = ET_DYN;
  std::uint16_t machine = kMachine;
  std::uint64_t base = 0x10000;  // first address of the one segment
  std::vector<std::string> symbols = {"cuInit"};
  std::vector<std::string> needed = {"libc.so.6"};
  std::uint64_t flags_1 = 0;
  bool dynamic = true;

  Bytes image() const {
    Bytes strings(1, 0);
    std::vector<Elf64_Dyn> entries;
    const auto add = [&entries](std::int64_t tag, std::uint64_t value) {
      Elf64_Dyn entry{};
      entry.d_tag = tag;
      entry.d_un.d_val = value;
      entries.push_back(entry);
    };
    for (const auto& name : symbols) append_text(strings, name + '\0');
    for (const auto& name : needed) {
      add(DT_NEEDED, strings.size());
      append_text(strings, name + '\0');
    }
    const std::uint64_t dynamic_at = sizeof(Elf64_Ehdr) + 2 * sizeof(Elf64_Phdr);
    const std::uint64_t strings_at = dynamic_at + (entries.size() + 4) * sizeof(Elf64_Dyn);
    add(DT_FLAGS_1, flags_1);
    add(DT_STRTAB, base + strings_at);
    add(DT_STRSZ, strings.size());
    add(DT_NULL, 0);

    Elf64_Ehdr header{};
    std::memcpy(header.e_ident, ELFMAG, SELFMAG);
    header.e_ident[EI_CLASS] = elf_class;
    header.e_ident[EI_DATA] = byte_order;
    header.e_type = type;
    header.e_machine = machine;
    header.e_phoff = sizeof header;
    header.e_phentsize = sizeof(Elf64_Phdr);
    header.e_phnum = 2;
    Elf64_Phdr load{};
    load.p_type = PT_LOAD;
    load.p_vaddr = base;
    load.p_filesz = strings_at + strings.size();
    Elf64_Phdr dynamic_segment{};
    dynamic_segment.p_type = dynamic ? PT_DYNAMIC : PT_NOTE;
    dynamic_segment.p_offset = dynamic_at;
    dynamic_segment.p_filesz = entries.size() * sizeof(Elf64_Dyn);

    Bytes bytes;
    append(bytes, header);
    append(bytes, load);
    append(bytes, dynamic_segment);
    for (const auto& entry : entries) append(bytes, entry);
    bytes.insert(bytes.end(), strings.begin(), strings.end());
    return bytes;
  }
};

struct CacheEntry {
  std::string name;
  std::string path;
  std::uint32_t flags = kCacheFlags;
  std::uint64_t hwcap = 0;
};

// glibc's format 1.1 alone, with `extra_count` entries claimed beyond those that are there.
inline Bytes new_cache(const std::vector<CacheEntry>& entries, unsigned char byte_order = 2,
                       std::uint32_t extra_count = 0) {
  Bytes strings;
  Bytes table;
  const std::uint32_t strings_at = 48 + 24 * static_cast<std::uint32_t>(entries.size());
  const auto store = [&](const std::string& text) {
    const auto at = strings_at + static_cast<std::uint32_t>(strings.size());
    append_text(strings, text + '\0');
    return at;
  };
  for (const auto& entry : entries) {
    append(table, entry.flags);
    append(table, store(entry.name));
    append(table, store(entry.path));
    append(table, std::uint32_t{0});
    append(table, entry.hwcap);
  }
  Bytes bytes;
  append_text(bytes, "glibc-ld.so.cache1.1");
  append(bytes, static_cast<std::uint32_t>(entries.size()) + extra_count);
  append(bytes, static_cast<std::uint32_t>(strings.size()));
  append(bytes, std::uint32_t{byte_order});
  for (int word = 0; word < 4; ++word) append(bytes, std::uint32_t{0});
  bytes.insert(bytes.end(), table.begin(), table.end());
  bytes.insert(bytes.end(), strings.begin(), strings.end());
  return bytes;
}

// The same behind the older format, which holds `old_entries` entries of its own (their content is of no interest).
inline Bytes old_and_new_cache(std::uint32_t old_entries, const Bytes& new_part) {
  Bytes bytes;
  append_text(bytes, std::string("ld.so-1.7.0\0", 12));
  append(bytes, old_entries);
  bytes.insert(bytes.end(), 12 * old_entries, 0xee);
  while (bytes.size() % 8 != 0) bytes.push_back(0);
  bytes.insert(bytes.end(), new_part.begin(), new_part.end());
  return bytes;
}

}  // namespace cudasched::hook::test
