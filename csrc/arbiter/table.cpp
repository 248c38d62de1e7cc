#include "arbiter/table.hpp"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"

namespace cudasched::arbiter {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::int64_t>::is_always_lock_free &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "a lock inside an atomic would not reach another process");
static_assert(std::is_standard_layout_v<Slot> && sizeof(Slot) == 320 && offsetof(Slot, name) == 208 &&
              offsetof(Slot, job) == 304);
static_assert(std::is_standard_layout_v<Layout> && sizeof(Layout) == 20928);
static_assert(offsetof(Layout, active) == 128 && offsetof(Layout, latency) == 192 && offsetof(Layout, waiting) == 256 &&
              offsetof(Layout, wake_sequence) == 264 && offsetof(Layout, turn) == 320 &&
              offsetof(Layout, slots) == 448);

namespace {

constexpr std::int64_t kRegistrationWaitNs = 5 * kNsPerSecond;
constexpr int kOpenAttempts = 100;
constexpr int kClaimAttempts = 5;
constexpr std::int64_t kNameLookNs = 10 * kNsPerMs;  // between two looks at what the file's name stands for
constexpr std::int64_t kFollowNs = 50 * kNsPerMs;    // latency clients move first, so that the others find them
constexpr rlim_t kHighestDescriptor = 4096;          // the kernel's table of descriptors grows with the highest
constexpr rlim_t kDescriptorRoom = 512;              // below it, or below the program's limit
constexpr const char* kElsewhere = "set CUDASCHED_RUN_DIR to another directory of your own";

// Lock bytes of the file. These places hold for every layout version: that is how one version sees another's clients.
constexpr off_t kRegistrationByte = 0;
constexpr off_t slot_byte(int slot) noexcept { return 1 + slot; }

constexpr std::uint64_t bit_of(int slot) noexcept { return std::uint64_t{1} << slot; }
constexpr bool is_slot(int slot) noexcept { return slot >= 0 && slot < kSlotCount; }

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

[[noreturn]] void fail(const std::string& what, int error, const std::string& remedy) {
  throw ArbiterError(what + ": " + std::generic_category().message(error) + "; " + remedy);
}

template <std::size_t N>
void copy_text(std::array<char, N>& to, std::string_view from) noexcept {
  to.fill('\0');
  std::copy_n(from.data(), std::min(from.size(), N - 1), to.data());
}

void pause_ns(long duration_ns) noexcept {
  const timespec time{0, duration_ns};
  nanosleep(&time, nullptr);
}

struct Identity {
  dev_t device;
  ino_t inode;
  bool operator==(const Identity&) const = default;
};

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

// A descriptor that the host program may close behind our back, and whose number may then be a file of the program's:
// whoever asks for the number gets it only while it still is the file it was opened as.
class Descriptor {
 public:
  explicit Descriptor(int number) noexcept : number_(number) {
    if (number >= 0) identity_ = identity_of(number);
  }
  Descriptor(Descriptor&& other) noexcept : number_(other.number_.exchange(-1)), identity_(other.identity_) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (const int number = get(); number >= 0) ::close(number);
  }

  // -1 once the descriptor was found closed or replaced.
  int get() noexcept {
    const int number = number_.load(std::memory_order_relaxed);
    if (number < 0 || identity_of(number) == identity_) return number;
    forget();
    return -1;
  }
  // The file's size and links; false once the descriptor is lost.
  bool inspect(struct stat& status) noexcept {
    const int number = number_.load(std::memory_order_relaxed);
    if (number < 0) return false;
    if (fstat(number, &status) == 0 && Identity{status.st_dev, status.st_ino} == identity_) return true;
    forget();
    return false;
  }
  bool lost() const noexcept { return number_.load(std::memory_order_relaxed) < 0; }
  void forget() noexcept { number_.store(-1, std::memory_order_relaxed); }
  const std::optional<Identity>& identity() const noexcept { return identity_; }

  // To a number that programs seldom close or use again, if there is one. Before any lock: those fall with the old one.
  void move_up() noexcept {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    const rlim_t top = std::min(limit.rlim_cur, kHighestDescriptor);
    if (top <= kDescriptorRoom) return;
    const int high = fcntl(get(), F_DUPFD_CLOEXEC, static_cast<int>(top - kDescriptorRoom));
    if (high >= 0) ::close(number_.exchange(high));
  }

 private:
  std::atomic<int> number_;
  std::optional<Identity> identity_;
};

std::string closed(const std::string& path) {
  return "the program closed the descriptor of the client table " + path +
         ", which it had not opened, and its locks fell; let it close descriptors before its first CUDA call, or only "
         "its own";
}

struct flock lock_range(short type, off_t first, off_t length) noexcept {
  struct flock range {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = first;
  range.l_len = length;
  return range;
}

// EBADF if the descriptor is lost.
bool try_lock(Descriptor& file, off_t byte) noexcept {
  struct flock range = lock_range(F_WRLCK, byte, 1);
  return fcntl(file.get(), F_SETLK, &range) == 0;
}

void unlock(Descriptor& file, off_t byte) noexcept {
  struct flock range = lock_range(F_UNLCK, byte, 1);
  fcntl(file.get(), F_SETLK, &range);
}

// The lock of another process in a range of bytes (length 0: to the end), if there is one.
std::optional<struct flock> foreign_lock(Descriptor& file, off_t first, off_t length) noexcept {
  struct flock range = lock_range(F_WRLCK, first, length);
  if (fcntl(file.get(), F_GETLK, &range) != 0 || range.l_type == F_UNLCK) return std::nullopt;
  return range;
}

// Byte 0, which whoever creates, replaces or registers holds. The wait is bounded: its holder may be stopped.
class RegistrationLock {
 public:
  RegistrationLock(Descriptor& file, const std::string& path) : file_(file) {
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
      pause_ns(wait_ns);
      wait_ns = std::min<long>(2 * wait_ns, kNsPerMs);
    }
  }
  RegistrationLock(const RegistrationLock&) = delete;
  RegistrationLock& operator=(const RegistrationLock&) = delete;
  ~RegistrationLock() { unlock(file_, kRegistrationByte); }

 private:
  Descriptor& file_;
};

// What this process owns, in a page that a fork wipes: a child finds that it owns nothing. The process id is compared
// too, for kernels that cannot wipe; alone it would not do, since a child in a new pid namespace may have its parent's.
class Ownership {
 public:
  Ownership() {
    void* page = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) fail("cannot map memory for a client table", errno, "free some memory");
    madvise(page, sizeof(Page), MADV_WIPEONFORK);
    page_ = new (page) Page{};
    page_->pid.store(getpid(), std::memory_order_relaxed);
  }
  Ownership(const Ownership&) = delete;
  Ownership& operator=(const Ownership&) = delete;
  ~Ownership() { munmap(page_, sizeof(Page)); }

  bool by_this_process() const noexcept { return page_->pid.load(std::memory_order_relaxed) == getpid(); }
  std::atomic<std::uint64_t>& slots() const noexcept { return page_->slots; }

 private:
  struct Page {
    std::atomic<pid_t> pid;
    std::atomic<std::uint64_t> slots;
  };
  Page* page_;
};

// What this process said of a client when it claimed the slot, to write it anew.
struct Record {
  Class client_class = Class::kNormal;
  bool hook_attached = true;
  std::int64_t claimed_ns = 0;
  std::uint64_t job = 0;
  std::atomic<std::int32_t> priority{0};
  std::atomic<std::int64_t> slo_ns{0};
  std::array<char, 64> name{};
};

// What one Table of a file has claimed, and what it has still to be told. Guarded by File::slots, but for `claimed`.
struct Claims {
  static constexpr std::array<std::int8_t, kSlotCount> kUnmoved = [] {
    std::array<std::int8_t, kSlotCount> slots{};
    for (int slot = 0; slot < kSlotCount; ++slot)
      slots[static_cast<std::size_t>(slot)] = static_cast<std::int8_t>(slot);
    return slots;
  }();

  std::atomic<std::uint64_t> claimed{0};
  bool repaired = false;
  bool moved = false;
  bool stranded = false;                               // and that was said
  std::array<std::int8_t, kSlotCount> now{kUnmoved};   // where a slot is, since the last kMoved
  std::array<std::int8_t, kSlotCount> said{kUnmoved};  // and up to it
};

// A table file and its directory, open.
struct Place {
  Place(Descriptor directory_, Descriptor file_) : directory(std::move(directory_)), file(std::move(file_)) {}

  Descriptor directory;
  Descriptor file;
};

// One table that is open. All Tables of one file in a process share it, since closing any descriptor of the file would
// drop every lock of the process on it. Where the file was followed to another one, the places before stay open: other
// threads may be about to use their numbers.
struct File {
  File(std::unique_ptr<Place> place_, std::string directory_path_, std::string name_, std::string path_,
       Layout* layout_)
      : directory_path(std::move(directory_path_)),
        name(std::move(name_)),
        path(std::move(path_)),
        layout(layout_),
        device_name(layout_->device_name) {
    places.reserve(Table::kMostMoves + 1);
    places.push_back(std::move(place_));
    place.store(places.back().get());
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    munmap(layout, sizeof(Layout));
    if (descriptor().get() >= 0) return;
    // The table may have been opened anew since: the other numbers may be that one's, and closing any drops its locks.
    for (const auto& each : places) each->directory.forget();
    for (Descriptor& other : spare) other.forget();
  }

  void keep_fault(const char* text) noexcept {
    try {
      fault = text;
    } catch (const std::exception&) {
      fault.clear();
    }
  }

  Descriptor& descriptor() const noexcept { return place.load(std::memory_order_acquire)->file; }
  Descriptor& directory() const noexcept { return place.load(std::memory_order_acquire)->directory; }

  // The slots of this process. None once the descriptor is lost: their locks are gone, and others may have taken them.
  std::uint64_t own_slots() const noexcept {
    return descriptor().lost() ? 0 : mine.slots().load(std::memory_order_relaxed);
  }

  const std::string directory_path;
  const std::string name;
  const std::string path;
  Layout* const layout;  // the same address for every place
  const std::array<char, 64> device_name;
  std::atomic<Place*> place;
  std::vector<std::unique_ptr<Place>> places;
  std::vector<Descriptor> spare;  // further descriptors of the same file, opened by accident, closed with it
  Ownership mine;
  std::mutex registration;  // held around byte 0
  std::mutex slots;         // held while slot locks change; never while waiting for another process
  std::array<Record, kSlotCount> records;
  std::vector<Claims*> tables;        // guarded by Registry::mutex and `slots`
  bool creates = false;               // the name is created where it is missing; guarded by Registry::mutex
  bool repaired_cut = false;          // the last repair was of its size; guarded by `slots`
  std::string fault;                  // of the last attempt to follow the name; guarded by `slots`
  std::int64_t name_seen_ns = 0;      // guarded by `slots`
  std::int64_t away_since_ns = 0;     // since when the name has stood for another file; guarded by `slots`
  std::atomic<int> cannot_extend{0};  // the errno for which the table was given up
};

// The files this process has open. A forked child starts another one, and leaves its parent's as it is: that one's
// mutexes may be held by threads that the child does not have, and its descriptors may not be closed.
struct Registry {
  static Registry& current();

  File* find(const std::optional<Identity>& identity) noexcept {
    const auto found = std::find_if(files.begin(), files.end(), [&](const auto& file) {
      return file->descriptor().identity() == identity && file->descriptor().get() >= 0;
    });
    return found == files.end() ? nullptr : found->get();
  }

  Ownership owner;
  Registry* parents = nullptr;  // keeps it reachable
  std::mutex mutex;
  std::vector<std::unique_ptr<File>> files;
};

Registry& Registry::current() {
  static std::atomic<Registry*> instance{nullptr};
  Registry* known = instance.load(std::memory_order_acquire);
  if (known != nullptr && known->owner.by_this_process()) return *known;
  auto fresh = std::make_unique<Registry>();
  fresh->parents = known;
  if (instance.compare_exchange_strong(known, fresh.get(), std::memory_order_acq_rel)) return *fresh.release();
  return *known;
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

// Puts a new, empty table in the place of what the name stands for now. Holds that file's byte 0. A table gets its name
// only when it is whole, so nobody ever sees half of one.
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

// Checks and maps a file just opened. Null if its name stands for another one meanwhile, or now for a fresh one.
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

// A table that was opened: one that the process has open already, or its place and its mapping.
struct Opened {
  File* known = nullptr;
  std::unique_ptr<Place> place;
  Layout* layout = nullptr;
};

// Finds the file among those open, or opens and checks it. With a device name it is created, or replaced if it is not a
// table of this version and nobody uses it. The caller holds the registry's mutex.
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

// The caller holds the registry's mutex.
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

int turn_owner(std::uint64_t turn) noexcept { return static_cast<int>(turn >> kTurnSlotShift) - 1; }

// Slots that anything in the table speaks of.
std::uint64_t slots_in_use(const Layout& layout) noexcept {
  std::uint64_t used = layout.active.load() | layout.latency.load() | layout.best_effort.load() | layout.waiting.load();
  for (int slot = 0; slot < kSlotCount; ++slot) {
    if (layout.slots[static_cast<std::size_t>(slot)].occupied.load() != 0) used |= bit_of(slot);
  }
  const int owner = turn_owner(layout.turn.load());
  return is_slot(owner) ? used | bit_of(owner) : used;
}

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) noexcept {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

void wake(Layout& layout) noexcept {
  layout.wake_sequence.fetch_add(1);
  futex(layout.wake_sequence, FUTEX_WAKE, INT_MAX, nullptr);
}

// The gate may have opened. Clients of other GPUs say only that there are some; whoever wakes them takes that back, so
// that one that was killed in its sleep costs one wake-up.
void wake_waiters(Layout& layout) noexcept {
  const bool distant = layout.distant_waiters.load() != 0 && layout.distant_waiters.exchange(0) != 0;
  if (distant || layout.waiting.load() != 0) wake(layout);
}

// The caller holds the slot's lock. `occupied` goes last: what a reaper killed on the way leaves, the next one sees.
void clear_slot(Layout& layout, int slot) noexcept {
  const std::uint64_t others = ~bit_of(slot);
  std::uint64_t turn = layout.turn.load();
  if (turn_owner(turn) == slot) layout.turn.compare_exchange_strong(turn, 0);
  layout.active.fetch_and(others);
  layout.latency.fetch_and(others);
  layout.best_effort.fetch_and(others);
  layout.waiting.fetch_and(others);
  layout.slots[static_cast<std::size_t>(slot)].occupied.store(0, std::memory_order_release);
  wake_waiters(layout);
}

void set_bit(std::atomic<std::uint64_t>& word, int slot, bool set) noexcept {
  if (((word.load() & bit_of(slot)) != 0) == set) return;
  if (set) {
    word.fetch_or(bit_of(slot));
  } else {
    word.fetch_and(~bit_of(slot));
  }
}

template <typename T>
void set_word(std::atomic<T>& word, T value) noexcept {
  if (word.load(std::memory_order_relaxed) != value) word.store(value);
}

template <std::size_t N>
void set_text(std::array<char, N>& field, const std::array<char, N>& value) noexcept {
  if (field != value) field = value;
}

// Bits that no client of this class has: damage, or left by a client that had lost its table and did not know it yet.
void clear_bits_of_other_classes(Layout& layout, int slot, Class client_class) noexcept {
  const bool holds = client_class != Class::kLatency && (layout.active.load() & bit_of(slot)) != 0;
  if (client_class != Class::kLatency) {
    set_bit(layout.active, slot, false);
    set_bit(layout.latency, slot, false);
  }
  if (client_class != Class::kBestEffort) {
    set_bit(layout.best_effort, slot, false);
    set_bit(layout.waiting, slot, false);
  }
  if (holds) wake_waiters(layout);
}

// What a client is, in its slot and in the words. The caller holds file.slots.
void write_client(File& file, int slot) noexcept {
  Layout& layout = *file.layout;
  const Record& record = file.records[static_cast<std::size_t>(slot)];
  Slot& entry = layout.slots[static_cast<std::size_t>(slot)];
  std::array<char, 32> version{};
  copy_text(version, CUDASCHED_VERSION);
  set_word(entry.client_class, static_cast<std::uint32_t>(record.client_class));
  set_word(entry.priority, record.priority.load());
  set_word(entry.pid, static_cast<std::int32_t>(getpid()));
  set_word(entry.hook_attached, record.hook_attached ? 1U : 0U);
  set_word(entry.claimed_ns, record.claimed_ns);
  set_word(entry.slo_ns, record.slo_ns.load());
  set_word(entry.job, record.job);
  set_text(entry.name, record.name);
  set_text(entry.version, version);
  set_word(entry.occupied, 1U);
  clear_bits_of_other_classes(layout, slot, record.client_class);
  if (record.client_class == Class::kLatency) set_bit(layout.latency, slot, true);
  if (record.client_class == Class::kBestEffort) set_bit(layout.best_effort, slot, true);
}

// The caller holds file.slots.
int reap_dead(File& file, std::uint64_t candidates) noexcept {
  Layout& layout = *file.layout;
  std::uint64_t turn = layout.turn.load();
  if (turn_owner(turn) >= kSlotCount) layout.turn.compare_exchange_strong(turn, 0);  // a damaged file

  for (std::uint64_t rest = slots_in_use(layout) & candidates & ~file.own_slots(); rest != 0; rest &= rest - 1) {
    const int slot = std::countr_zero(rest);
    const Slot& entry = layout.slots[static_cast<std::size_t>(slot)];
    const std::uint32_t client_class = entry.client_class.load();
    if (entry.occupied.load() == 0 || client_class >= static_cast<std::uint32_t>(kClassCount)) continue;
    clear_bits_of_other_classes(layout, slot, static_cast<Class>(client_class));
  }
  for (std::uint64_t rest = file.own_slots() & candidates; rest != 0; rest &= rest - 1) {
    const int slot = std::countr_zero(rest);
    clear_bits_of_other_classes(layout, slot, file.records[static_cast<std::size_t>(slot)].client_class);
  }

  int reaped = 0;
  std::uint64_t left = slots_in_use(layout) & candidates & ~file.own_slots();
  for (; left != 0; left &= left - 1) {
    const int slot = std::countr_zero(left);
    if (!try_lock(file.descriptor(), slot_byte(slot))) continue;
    if ((slots_in_use(layout) & bit_of(slot)) != 0) {  // else its owner has just released it
      clear_slot(layout, slot);
      ++reaped;
    }
    unlock(file.descriptor(), slot_byte(slot));
  }
  return reaped;
}

bool header_is_sound(const File& file) noexcept {
  const Layout& layout = *file.layout;
  return layout.magic == Layout::kMagic && layout.layout_version == kLayoutVersion && layout.bytes == sizeof(Layout) &&
         layout.device_name == file.device_name;
}

// The file has its size and its header again; of what its clients wrote, nothing that was cut off. Where there is no
// room for it, memory of the process's own takes the file's place, and the table is lost. The caller holds file.slots.
bool repair(File& file, off_t size) noexcept {
  Descriptor& descriptor = file.descriptor();
  int error = 0;
  if (size < static_cast<off_t>(sizeof(Layout))) {
    do {
      error = posix_fallocate(descriptor.get(), 0, sizeof(Layout));
    } while (error == EINTR);
  } else if (size > static_cast<off_t>(sizeof(Layout)) && ftruncate(descriptor.get(), sizeof(Layout)) != 0) {
    error = errno;
  }
  if (error != 0) {
    file.cannot_extend.store(error);
    descriptor.forget();
    mmap(file.layout, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return false;
  }
  Layout& layout = *file.layout;
  layout.magic = Layout::kMagic;
  layout.layout_version = kLayoutVersion;
  layout.bytes = sizeof(Layout);
  layout.device_name = file.device_name;
  return true;
}

// Word by word: other threads write some of them.
void copy_slot(Slot& to, const Slot& from) noexcept {
  static_assert(sizeof(Slot) % sizeof(std::uint64_t) == 0);
  auto* const target = reinterpret_cast<std::uint64_t*>(&to);
  const auto* const source = reinterpret_cast<const std::uint64_t*>(&from);
  for (std::size_t i = 0; i < sizeof(Slot) / sizeof(std::uint64_t); ++i) {
    __atomic_store_n(target + i, __atomic_load_n(source + i, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
  }
}

// Free slots of the new file for this process's, their numbers where these are free. The locks are held then.
std::array<std::int8_t, kSlotCount> lock_slots(Descriptor& file, std::uint64_t wanted, const std::string& path) {
  std::array<std::int8_t, kSlotCount> to{};
  std::uint64_t taken = 0;
  std::uint64_t left = 0;
  const auto take = [&](int slot, int target) {
    if ((taken & bit_of(target)) != 0 || !try_lock(file, slot_byte(target))) return false;
    taken |= bit_of(target);
    to[static_cast<std::size_t>(slot)] = static_cast<std::int8_t>(target);
    return true;
  };
  for (std::uint64_t rest = wanted; rest != 0; rest &= rest - 1) {
    const int slot = std::countr_zero(rest);
    if (!take(slot, slot)) left |= bit_of(slot);
  }
  for (; left != 0; left &= left - 1) {
    int target = 0;
    while (target < kSlotCount && !take(std::countr_zero(left), target)) ++target;
    if (target == kSlotCount) {
      throw ArbiterError("all " + std::to_string(kSlotCount) + " slots of the client table " + path + " are taken");
    }
  }
  return to;
}

// Follows the name of a file that was deleted or replaced to the file that is there now, or creates it. The clients of
// this process keep what they said of themselves. Throws ArbiterError; false: not at this moment. The caller holds the
// registry's mutex.
bool follow(Registry& registry, File& file) {
  if (file.places.size() > Table::kMostMoves) {
    throw ArbiterError("it was deleted " + std::to_string(Table::kMostMoves + 1) +
                       " times; let nothing delete it while programs run");
  }
  std::optional<std::string_view> device_name;
  const std::string name_of_device = text(file.device_name);
  if (file.creates) device_name = name_of_device;
  Opened opened = open_place(registry, file.directory_path, file.name, file.path, device_name);
  if (opened.known != nullptr) return false;  // the same file, or one that another Table of this process is using
  const auto unmap = [](Layout* layout) { munmap(layout, sizeof(Layout)); };
  const std::unique_ptr<Layout, decltype(unmap)> layout(opened.layout, unmap);
  Place& place = *opened.place;
  const std::lock_guard registration(file.registration);
  const RegistrationLock lock(place.file, file.path);
  if (identity_of(place.directory.get(), file.name) != place.file.identity()) return false;
  const std::lock_guard slots(file.slots);
  const std::uint64_t own = file.own_slots();
  const std::array<std::int8_t, kSlotCount> to = lock_slots(place.file, own, file.path);

  Layout& before = *file.layout;
  std::uint64_t now_own = 0;
  for (std::uint64_t rest = own; rest != 0; rest &= rest - 1) {
    const int slot = std::countr_zero(rest);
    const int target = to[static_cast<std::size_t>(slot)];
    clear_slot(*layout, target);
    Slot& entry = layout->slots[static_cast<std::size_t>(target)];
    copy_slot(entry, before.slots[static_cast<std::size_t>(slot)]);
    now_own |= bit_of(target);
    if ((before.active.load() & bit_of(slot)) != 0) layout->active.fetch_or(bit_of(target));
    if ((before.waiting.load() & bit_of(slot)) != 0) layout->waiting.fetch_or(bit_of(target));
  }
  // What the old file says of us stays: those that are still in it go on holding back for an active latency client,
  // until they have moved as well or its heartbeat is stale.
  wake(before);
  if (mmap(file.layout, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, place.file.get(), 0) ==
      MAP_FAILED) {
    file.cannot_extend.store(errno);
    file.descriptor().forget();
    throw ArbiterError("no memory to map it");
  }
  file.places.push_back(std::move(opened.place));
  file.place.store(&place, std::memory_order_release);
  file.mine.slots().store(now_own);

  std::array<Record, kSlotCount> records;
  const auto copy = [](Record& target, const Record& source) {
    target.client_class = source.client_class;
    target.hook_attached = source.hook_attached;
    target.claimed_ns = source.claimed_ns;
    target.job = source.job;
    target.priority.store(source.priority.load());
    target.slo_ns.store(source.slo_ns.load());
    target.name = source.name;
  };
  for (std::uint64_t rest = own; rest != 0; rest &= rest - 1) {
    const auto slot = static_cast<std::size_t>(std::countr_zero(rest));
    copy(records[static_cast<std::size_t>(to[slot])], file.records[slot]);
  }
  for (std::uint64_t rest = now_own; rest != 0; rest &= rest - 1) {
    const auto slot = static_cast<std::size_t>(std::countr_zero(rest));
    copy(file.records[slot], records[slot]);
    write_client(file, static_cast<int>(slot));
  }
  for (Claims* const table : file.tables) {
    std::uint64_t claimed = 0;
    for (std::uint64_t rest = table->claimed.load(); rest != 0; rest &= rest - 1) {
      claimed |= bit_of(to[static_cast<std::size_t>(std::countr_zero(rest))]);
    }
    table->claimed.store(claimed);
    for (std::int8_t& slot : table->now) {
      if ((own & bit_of(slot)) != 0) slot = to[static_cast<std::size_t>(slot)];
    }
    table->moved = true;
    table->stranded = false;
  }
  return true;
}

// The caller holds file.slots.
bool holds_latency_client(const File& file) noexcept {
  for (std::uint64_t rest = file.own_slots(); rest != 0; rest &= rest - 1) {
    if (file.records[static_cast<std::size_t>(std::countr_zero(rest))].client_class == Class::kLatency) return true;
  }
  return false;
}

// Does the name stand for another file? Where it stands for none, but the file still has a name, all of its clients
// have been moved with it, or this process has another root directory.
bool name_has_another(const File& file) noexcept {
  struct stat status {};
  if (lstat(file.path.c_str(), &status) != 0) return false;
  return Identity{status.st_dev, status.st_ino} != file.descriptor().identity();
}

}  // namespace

struct Table::State {
  explicit State(File& file_) noexcept : file(file_) {}

  bool usable() const noexcept { return !abandoned.load(std::memory_order_relaxed) && file.mine.by_this_process(); }
  bool owns(int slot) const noexcept {
    return is_slot(slot) && (claims.claimed.load(std::memory_order_relaxed) & bit_of(slot)) != 0 &&
           (file.own_slots() & bit_of(slot)) != 0;
  }

  File& file;
  Claims claims;
  std::atomic<bool> abandoned{false};
};

std::unique_ptr<Table> Table::open(const std::string& directory, const std::string& device_uuid,
                                   std::string_view device_name) {
  if (device_uuid.empty() || device_uuid.size() > 128 || device_uuid.find('/') != std::string::npos ||
      device_uuid.find('\0') != std::string::npos) {
    throw ArbiterError("no client table can be named after the GPU UUID \"" + device_uuid +
                       "\"; use the driver's (nvidia-smi -L shows it)");
  }
  const std::string name = device_uuid + ".arbiter";
  const std::string path = directory + (directory.ends_with('/') ? "" : "/") + name;
  Registry& registry = Registry::current();
  const std::lock_guard lock(registry.mutex);
  File& file = open_file(registry, directory, name, path, device_name);
  std::unique_ptr<Table> table(new Table(path, file.layout, std::make_unique<State>(file)));
  const std::lock_guard slots(file.slots);
  file.tables.push_back(&table->state_->claims);
  return table;
}

std::unique_ptr<Table> Table::open_existing(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  Registry& registry = Registry::current();
  const std::lock_guard lock(registry.mutex);
  File& file = open_file(registry, directory, name, path, std::nullopt);
  std::unique_ptr<Table> table(new Table(path, file.layout, std::make_unique<State>(file)));
  const std::lock_guard slots(file.slots);
  file.tables.push_back(&table->state_->claims);
  return table;
}

Table::Table(std::string path, Layout* layout, std::unique_ptr<State> state)
    : path_(std::move(path)), layout_(layout), state_(std::move(state)) {}

Table::~Table() {
  File& file = state_->file;
  if (!file.mine.by_this_process()) return;  // a forked child: the file stays open, or its own locks might fall
  Registry& registry = Registry::current();
  const std::lock_guard lock(registry.mutex);  // nobody opens the file anew while we close it, nor follows its name
  for (std::uint64_t left = state_->claims.claimed.load(); left != 0; left &= left - 1) release(std::countr_zero(left));
  {
    const std::lock_guard slots(file.slots);
    std::erase(file.tables, &state_->claims);
  }
  if (file.tables.empty()) std::erase_if(registry.files, [&](const auto& open) { return open.get() == &file; });
}

int Table::claim(const ClientInfo& client) {
  if (!state_->usable()) {
    throw ArbiterError("the client table " + path_ + " was opened before a fork; open it again in the child");
  }
  File& file = state_->file;
  if (!check() || file.directory().get() < 0) throw ArbiterError(why_lost());
  const std::lock_guard registration(file.registration);
  const RegistrationLock lock(file.descriptor(), path_);
  if (identity_of(file.directory().get(), file.name) != file.descriptor().identity()) {
    throw ArbiterError("the client table " + path_ +
                       " was removed, or replaced by another version of cudasched; restart this program");
  }
  for (int attempt = 0; attempt < kClaimAttempts; ++attempt) {
    if (attempt > 0) pause_ns(kNsPerMs);  // a reaper may hold the lock of a dead client's slot for a moment
    const std::lock_guard slots(file.slots);
    reap_dead(file, ~std::uint64_t{0});
    const std::uint64_t mine = file.own_slots();
    for (int index = 0; index < kSlotCount; ++index) {
      if ((mine & bit_of(index)) != 0 || !try_lock(file.descriptor(), slot_byte(index))) continue;
      const std::int64_t now = now_ns();
      Slot& entry = slot(index);
      clear_slot(*layout_, index);
      Record& record = file.records[static_cast<std::size_t>(index)];
      record.client_class = client.client_class;
      record.hook_attached = client.hook_attached;
      record.claimed_ns = now;
      record.job = client.job;
      record.priority.store(client.priority);
      record.slo_ns.store(client.slo_ns);
      copy_text(record.name, client.name);
      entry.client_class.store(static_cast<std::uint32_t>(client.client_class));
      entry.regions.store(0);
      entry.heartbeat_ns.store(now);
      for (auto* const time :
           {&entry.active_since_ns, &entry.deadline_ns, &entry.in_flight_until_ns, &entry.overdue_since_ns,
            &entry.last_launch_ns, &entry.entered_ns, &entry.expected_ns, &entry.admitted_at_entry_ns,
            &entry.hint_until_ns, &entry.foreseen_ns, &entry.foreseen_over_ns, &entry.rate_free_ns, &entry.request_ns,
            &entry.request_waited_ns, &entry.virtual_ns, &entry.policy_since_ns}) {
        time->store(0);
      }
      for (auto* const count :
           {&entry.launches, &entry.device_launches, &entry.gate_waits, &entry.gate_wait_ns, &entry.requests}) {
        count->store(0);
      }
      state_->claims.claimed.fetch_or(bit_of(index));
      file.mine.slots().fetch_or(bit_of(index));
      write_client(file, index);
      return index;
    }
  }
  if (lost()) throw ArbiterError(why_lost());
  throw ArbiterError("all " + std::to_string(kSlotCount) + " slots of the client table " + path_ +
                     " are taken by living programs; end one of them (cudasched status lists them)");
}

void Table::release(int slot) noexcept {
  if (!state_->usable() || !state_->owns(slot)) return;
  File& file = state_->file;
  const std::lock_guard lock(file.slots);
  if (!check()) return;
  clear_slot(*layout_, slot);
  state_->claims.claimed.fetch_and(~bit_of(slot));
  file.mine.slots().fetch_and(~bit_of(slot));
  unlock(file.descriptor(), slot_byte(slot));
}

void Table::set_priority(int slot, std::int32_t priority) noexcept {
  if (!state_->owns(slot)) return;
  state_->file.records[static_cast<std::size_t>(slot)].priority.store(priority);
  this->slot(slot).priority.store(priority, std::memory_order_relaxed);
}

void Table::set_slo(int slot, std::int64_t slo_ns) noexcept {
  if (!state_->owns(slot)) return;
  state_->file.records[static_cast<std::size_t>(slot)].slo_ns.store(slo_ns);
  this->slot(slot).slo_ns.store(slo_ns, std::memory_order_relaxed);
}

void Table::set_active(int slot, std::int64_t now_ns) noexcept {
  if (!state_->owns(slot)) return;
  Slot& entry = this->slot(slot);
  entry.active_since_ns.store(now_ns, std::memory_order_relaxed);
  entry.heartbeat_ns.store(now_ns, std::memory_order_relaxed);
  layout_->active.fetch_or(bit_of(slot));
  if ((layout_->latency.load(std::memory_order_relaxed) & bit_of(slot)) != 0) return;
  const Record& record = state_->file.records[static_cast<std::size_t>(slot)];
  if (record.client_class == Class::kLatency) layout_->latency.fetch_or(bit_of(slot));  // a damaged table
}

// Sequentially consistent with a gate that sets its `waiting` bit and then reads `active`: one of the two sees the
// other.
void Table::clear_active(int slot) noexcept {
  if (!state_->owns(slot)) return;
  const std::uint64_t before = layout_->active.fetch_and(~bit_of(slot));
  if (before == bit_of(slot)) wake_waiters(*layout_);
}

bool Table::alive(int slot) const noexcept {
  if (!is_slot(slot)) return false;
  File& file = state_->file;
  if ((file.own_slots() & bit_of(slot)) != 0) return true;
  return foreign_lock(file.descriptor(), slot_byte(slot), 1).has_value();
}

int Table::reap(std::uint64_t candidates) noexcept {
  if (!state_->usable()) return 0;
  const std::lock_guard lock(state_->file.slots);
  if (!check()) return 0;
  return reap_dead(state_->file, candidates);
}

Condition Table::tend(std::int64_t now, bool at_once) noexcept {
  File& file = state_->file;
  Claims& claims = state_->claims;
  if (!state_->usable()) return Condition::kSound;
  bool follows = false;
  {
    const std::lock_guard slots(file.slots);
    struct stat status {};
    if (!file.descriptor().inspect(status)) return Condition::kLost;
    const bool cut = status.st_size != static_cast<off_t>(sizeof(Layout));
    if (cut || !header_is_sound(file)) {
      if (!repair(file, status.st_size)) return Condition::kLost;
      for (Claims* const table : file.tables) table->repaired = true;
      file.repaired_cut = cut;
    }
    for (std::uint64_t rest = file.own_slots(); rest != 0; rest &= rest - 1) write_client(file, std::countr_zero(rest));
    if (at_once || now - file.name_seen_ns >= kNameLookNs) {
      file.name_seen_ns = now;
      const bool away = status.st_nlink == 0 || name_has_another(file);
      if (!away) file.away_since_ns = 0;
      if (away && file.away_since_ns == 0) file.away_since_ns = now;
      follows = away && (at_once || holds_latency_client(file) || now - file.away_since_ns >= kFollowNs);
    }
  }
  if (follows) {
    std::string fault;
    try {
      Registry& registry = Registry::current();
      const std::lock_guard lock(registry.mutex);
      follow(registry, file);
    } catch (const std::exception& error) {
      const std::lock_guard slots(file.slots);
      file.name_seen_ns = now + kNsPerSecond;  // the next attempt
      if (lost()) return Condition::kLost;
      if (!claims.stranded && file.creates) {
        claims.stranded = true;
        file.keep_fault(error.what());
        return Condition::kStranded;
      }
    }
  }
  const std::lock_guard slots(file.slots);
  if (claims.moved) {
    claims.moved = claims.repaired = false;
    claims.said = claims.now;
    claims.now = Claims::kUnmoved;
    return Condition::kMoved;
  }
  return std::exchange(claims.repaired, false) ? Condition::kRepaired : Condition::kSound;
}

int Table::slot_now(int claimed_slot) const noexcept {
  if (!is_slot(claimed_slot)) return claimed_slot;
  const std::lock_guard slots(state_->file.slots);
  return state_->claims.said[static_cast<std::size_t>(claimed_slot)];
}

std::string Table::why() const {
  File& file = state_->file;
  const std::lock_guard slots(file.slots);
  if (state_->claims.stranded) return "the client table " + path_ + " was deleted or replaced: " + file.fault;
  return "the client table " + path_ + (file.repaired_cut ? " did not have its size any more" : " was damaged");
}

bool Table::lost() const noexcept { return state_->file.descriptor().lost(); }

bool Table::check() noexcept { return state_->file.descriptor().get() >= 0; }

std::string Table::why_lost() const {
  const int error = state_->file.cannot_extend.load();
  if (error == 0) return closed(path_);
  return "the client table " + path_ +
         " had been cut short and cannot be extended: " + std::generic_category().message(error) +
         "; free space there, or " + kElsewhere;
}

void Table::sleep(std::uint32_t seen, std::int64_t timeout_ns) noexcept {
  if (timeout_ns <= 0) return;
  const timespec timeout{timeout_ns / kNsPerSecond, static_cast<long>(timeout_ns % kNsPerSecond)};
  futex(layout_->wake_sequence, FUTEX_WAIT, seen, &timeout);
  File& file = state_->file;
  struct stat status {};
  if (!file.descriptor().inspect(status) || status.st_size >= static_cast<off_t>(sizeof(Layout))) return;
  const std::lock_guard slots(file.slots);
  if (repair(file, status.st_size)) {
    for (Claims* const table : file.tables) table->repaired = true;
    file.repaired_cut = true;
  }
}

void Table::wake_all() noexcept { wake(*layout_); }

void Table::abandon() noexcept {
  state_->abandoned.store(true);
  state_->claims.claimed.store(0);
}

std::string default_directory() {
  const char* wanted = std::getenv("CUDASCHED_RUN_DIR");
  if (wanted != nullptr && *wanted != '\0') return wanted;
  return "/dev/shm/cudasched-" + std::to_string(geteuid());
}

}  // namespace cudasched::arbiter
