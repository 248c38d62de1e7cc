#include "arbiter/table_file.hpp"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/sleep.hpp"

namespace cudasched::arbiter {
namespace {

constexpr std::int64_t kRegistrationWaitNs = 5 * kNsPerSecond;
constexpr int kOpenAttempts = 100;
constexpr rlim_t kHighestDescriptor = 4096;  // the kernel's table of descriptors grows with the highest
constexpr rlim_t kDescriptorRoom = 512;      // below it, or below the program's limit

// The unchanging head of a Layout.
struct Header {
  std::uint64_t magic;
  std::uint32_t layout_version;
  std::uint32_t bytes;
  std::array<char, 64> device_name;
};
static_assert(offsetof(Header, layout_version) == offsetof(Layout, layout_version) &&
              offsetof(Header, bytes) == offsetof(Layout, bytes) &&
              offsetof(Header, device_name) == offsetof(Layout, device_name) && sizeof(Header) == 80);

struct flock lock_range(short type, off_t first, off_t length) noexcept {
  struct flock range {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = first;
  range.l_len = length;
  return range;
}

Descriptor open_directory(std::string directory, bool create) {
  while (directory.size() > 1 && directory.back() == '/') directory.pop_back();  // "link/" would follow the link
  if (directory.empty()) {
    throw ArbiterError(std::string("the directory for client tables has an empty name; ") + kElsewhere);
  }
  const auto open_it = [&] { return ::open(directory.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); };
  int opened = open_it();
  if (opened < 0 && errno == ENOENT && create) {
    if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
      fail("cannot create the directory for client tables " + directory, errno, kElsewhere);
    }
    opened = open_it();
  }
  if (opened < 0) {
    const int error = errno;
    fail("cannot open the directory for client tables " + directory + (error == ENOTDIR ? " (a link is refused)" : ""),
         error, kElsewhere);
  }
  Descriptor descriptor(opened);
  struct stat status {};
  if (fstat(opened, &status) != 0) fail("cannot inspect the directory " + directory, errno, kElsewhere);
  if (status.st_uid != geteuid()) {
    throw ArbiterError("the directory for client tables " + directory + " belongs to user " +
                       std::to_string(status.st_uid) + ", not to user " + std::to_string(geteuid()) + "; " +
                       kElsewhere);
  }
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    throw ArbiterError("the directory for client tables " + directory +
                       " may be written by other users; run chmod go-w on it, or " + kElsewhere);
  }
  return descriptor;
}

void reserve(int file, const std::string& path) {
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(file, 0, sizeof(Layout));
  if (error != 0) {
    fail("cannot reserve " + std::to_string(sizeof(Layout)) + " bytes for the client table " + path, error,
         std::string("free space there, or ") + kElsewhere);
  }
}

// Puts a new, empty table in the place of the file that has the name now. Holds that file's byte 0. A table gets its
// name only when whole, so that no process ever sees half of one.
void write_fresh(int directory, const std::string& name, const std::string& path, std::string_view device_name) {
  const std::string draft = name + ".new";
  unlinkat(directory, draft.c_str(), 0);  // of a process killed right here
  Descriptor file(openat(directory, draft.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (file.get() < 0) fail("cannot create the client table " + path, errno, kElsewhere);
  try {
    reserve(file.get(), path);
    Header header{Layout::kMagic, kLayoutVersion, sizeof(Layout), {}};
    copy_text(header.device_name, device_name);
    if (pwrite(file.get(), &header, sizeof header, 0) != static_cast<ssize_t>(sizeof header)) {
      fail("cannot write the client table " + path, errno, kElsewhere);
    }
    if (renameat(directory, draft.c_str(), directory, name.c_str()) != 0) {
      fail("cannot name the client table " + path, errno, kElsewhere);
    }
  } catch (...) {
    unlinkat(directory, draft.c_str(), 0);
    throw;
  }
}

// Why a file is not a table of this layout version; empty if it is one.
std::string fault_of(int file, off_t bytes) {
  if (bytes == 0) return "is empty";
  Header header{};
  if (pread(file, &header, sizeof header, 0) != static_cast<ssize_t>(sizeof header) || header.magic != Layout::kMagic) {
    return "is not a client table";
  }
  if (header.layout_version != kLayoutVersion) {
    return "has layout version " + std::to_string(header.layout_version) + ", this program's cudasched has " +
           std::to_string(kLayoutVersion);
  }
  if (header.bytes != sizeof(Layout) || bytes != static_cast<off_t>(sizeof(Layout))) {
    return "has a wrong size for layout version " + std::to_string(kLayoutVersion);
  }
  return {};
}

// Checks and maps a file just opened. Null if another file has the name meanwhile, or a fresh one now.
Layout* map_table(int directory, const std::string& name, Descriptor& file, const std::string& path,
                  std::optional<std::string_view> device_name) {
  const RegistrationLock lock(file, path);
  if (identity_of(directory, name) != file.identity()) return nullptr;  // replaced while we waited
  struct stat status {};
  if (fstat(file.get(), &status) != 0) fail("cannot inspect the client table " + path, errno, kElsewhere);
  const std::string fault = fault_of(file.get(), status.st_size);
  if (fault.empty()) {
    reserve(file.get(), path);  // of a file with holes, a full filesystem would make a SIGBUS
    void* memory = mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (memory == MAP_FAILED) fail("cannot map the client table " + path, errno, kElsewhere);
    return static_cast<Layout*>(memory);
  }
  if (foreign_lock(file, slot_byte(0), 0)) {
    throw ArbiterError("the client table " + path + " " + fault +
                       ", and living programs use it; restart the older programs");
  }
  if (!device_name) {
    throw ArbiterError("the client table " + path + " " + fault +
                       "; the next program under this cudasched replaces it");
  }
  write_fresh(directory, name, path, *device_name);
  return nullptr;
}

}  // namespace

[[noreturn]] void fail(const std::string& what, int error, const std::string& remedy) {
  // Another directory is no remedy for these.
  const std::string here = error == EMFILE   ? "raise this program's limit of open files (ulimit -n)"
                           : error == ENFILE ? "the system's limit of open files is reached (fs.file-max)"
                                             : remedy;
  throw ArbiterError(what + ": " + std::generic_category().message(error) + "; " + here);
}

std::optional<Identity> identity_of(int number) noexcept {
  struct stat status {};
  if (fstat(number, &status) != 0) return std::nullopt;
  return Identity{status.st_dev, status.st_ino};
}

std::optional<Identity> identity_of(int directory, const std::string& name) noexcept {
  struct stat status {};
  if (fstatat(directory, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) return std::nullopt;
  return Identity{status.st_dev, status.st_ino};
}

void Descriptor::move_up() noexcept {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t top = std::min(limit.rlim_cur, kHighestDescriptor);
  if (top <= kDescriptorRoom) return;
  const int high = fcntl(get(), F_DUPFD_CLOEXEC, static_cast<int>(top - kDescriptorRoom));
  if (high >= 0) ::close(number_.exchange(high));
}

std::string closed(const std::string& path) {
  return "the program closed the descriptor of the client table " + path +
         ", and the table's locks fell; let it close descriptors before the first CUDA call, or only its own";
}

bool try_lock(Descriptor& file, off_t byte) noexcept {
  struct flock range = lock_range(F_WRLCK, byte, 1);
  return fcntl(file.get(), F_SETLK, &range) == 0;
}

void unlock(Descriptor& file, off_t byte) noexcept {
  struct flock range = lock_range(F_UNLCK, byte, 1);
  fcntl(file.get(), F_SETLK, &range);
}

std::optional<struct flock> foreign_lock(Descriptor& file, off_t first, off_t length) noexcept {
  struct flock range = lock_range(F_WRLCK, first, length);
  if (fcntl(file.get(), F_GETLK, &range) != 0 || range.l_type == F_UNLCK) return std::nullopt;
  return range;
}

RegistrationLock::RegistrationLock(Descriptor& file, const std::string& path) : file_(file) {
  const std::int64_t until_ns = now_ns() + kRegistrationWaitNs;
  long wait_ns = 20 * kNsPerUs;
  while (!try_lock(file_, kRegistrationByte)) {
    const int error = errno;
    if (error == EBADF) throw ArbiterError(closed(path));
    if (error != EAGAIN && error != EACCES && error != EINTR) {
      fail("cannot lock the client table " + path, error, kElsewhere);
    }
    if (now_ns() > until_ns) {
      const auto holder = foreign_lock(file_, kRegistrationByte, 1);
      const std::string who =
          holder && holder->l_pid > 0 ? "process " + std::to_string(holder->l_pid) : std::string("another process");
      throw ArbiterError("the client table " + path + " has been locked by " + who +
                         " for 5 s; if it is stopped or hangs, continue or end it");
    }
    sleep_ns(wait_ns);
    wait_ns = std::min<long>(2 * wait_ns, kNsPerMs);
  }
}

Ownership::Ownership() {
  void* page = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) fail("cannot map memory for a client table", errno, "free some memory");
  madvise(page, sizeof(Page), MADV_WIPEONFORK);
  page_ = new (page) Page{};
  page_->pid.store(getpid(), std::memory_order_relaxed);
}

Ownership::~Ownership() { munmap(page_, sizeof(Page)); }

File::~File() {
  munmap(layout, sizeof(Layout));
  if (descriptor().get() >= 0) return;
  // The table may have been opened anew since: the other numbers may be that table's, and closing any drops its locks.
  for (const auto& each : places) each->directory.forget();
  for (Descriptor& other : spare) other.forget();
}

Registry& Registry::current() {
  static std::atomic<Registry*> instance{nullptr};
  Registry* known = instance.load(std::memory_order_acquire);
  if (known != nullptr && known->owner.by_this_process()) return *known;
  auto fresh = std::make_unique<Registry>();
  fresh->parents = known;
  if (instance.compare_exchange_strong(known, fresh.get(), std::memory_order_acq_rel)) return *fresh.release();
  return *known;
}

Opened open_place(Registry& registry, const std::string& directory_path, const std::string& name,
                  const std::string& path, std::optional<std::string_view> device_name) {
  Descriptor directory = open_directory(directory_path, device_name.has_value());
  for (int attempt = 0; attempt < kOpenAttempts; ++attempt) {
    if (File* known = registry.find(identity_of(directory.get(), name))) return {known, nullptr, nullptr};

    const int create = device_name ? O_CREAT : 0;
    Descriptor file(
        openat(directory.get(), name.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | create, 0600));
    if (file.get() < 0) {
      fail("cannot open the client table " + path, errno,
           device_name ? kElsewhere : "a program under cudasched creates it");
    }
    struct stat status {};
    if (fstat(file.get(), &status) != 0) fail("cannot inspect the client table " + path, errno, kElsewhere);
    if (File* known = registry.find(file.identity())) {
      known->spare.push_back(std::move(file));
      return {known, nullptr, nullptr};
    }
    if (!S_ISREG(status.st_mode) || status.st_uid != geteuid() || (status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
      throw ArbiterError("the client table " + path +
                         " is not a regular file that only this user may write; remove it");
    }

    file.move_up();
    if (Layout* layout = map_table(directory.get(), name, file, path, device_name)) {
      directory.move_up();
      return {nullptr, std::make_unique<Place>(std::move(directory), std::move(file)), layout};
    }
  }
  throw ArbiterError("the client table " + path + " is replaced again and again; end the programs that do so, or " +
                     kElsewhere);
}

File& open_file(Registry& registry, const std::string& directory_path, const std::string& name, const std::string& path,
                std::optional<std::string_view> device_name) {
  Opened opened = open_place(registry, directory_path, name, path, device_name);
  File* file = opened.known;
  if (file == nullptr) {
    registry.files.push_back(
        std::make_unique<File>(std::move(opened.place), directory_path, name, path, opened.layout));
    file = registry.files.back().get();
  }
  file->creates = file->creates || device_name.has_value();
  return *file;
}

}  // namespace cudasched::arbiter
