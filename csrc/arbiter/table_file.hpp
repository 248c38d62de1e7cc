// The files of client tables that this process has open: descriptors that the host program may close behind our back,
// the locks, the slots. Internal to this room (table.hpp is its face).
//
// Threads: a File's parts say which mutex guards them. Nothing here is on the launch path but File::own_slots().
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "arbiter/table.hpp"
#include "base/class.hpp"

namespace cudasched::arbiter {

inline constexpr const char* kElsewhere = "set CUDASCHED_RUN_DIR to another directory of your own";

// Lock bytes of the file. All layout versions use these places, so one version sees another's clients.
inline constexpr off_t kRegistrationByte = 0;
constexpr off_t slot_byte(int slot) noexcept { return 1 + slot; }

constexpr std::uint64_t bit_of(int slot) noexcept { return std::uint64_t{1} << slot; }
constexpr bool is_slot(int slot) noexcept { return slot >= 0 && slot < kSlotCount; }

[[noreturn]] void fail(const std::string& what, int error, const std::string& remedy);  // throws ArbiterError

template <std::size_t N>
void copy_text(std::array<char, N>& to, std::string_view from) noexcept {
  to.fill('\0');
  std::copy_n(from.data(), std::min(from.size(), N - 1), to.data());
}

struct Identity {
  dev_t device;
  ino_t inode;
  bool operator==(const Identity&) const = default;
};

std::optional<Identity> identity_of(int number) noexcept;
std::optional<Identity> identity_of(int directory, const std::string& name) noexcept;

// A descriptor that the host program may close behind our back, and whose number may then be a file of the program's. A
// caller gets the number only while it still stands for the opened file.
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
  void move_up() noexcept;

 private:
  std::atomic<int> number_;
  std::optional<Identity> identity_;
};

// The message for a table whose descriptor the program closed.
std::string closed(const std::string& path);

// EBADF if the descriptor is lost.
bool try_lock(Descriptor& file, off_t byte) noexcept;
void unlock(Descriptor& file, off_t byte) noexcept;

// The lock of another process in a range of bytes (length 0: to the end), if there is one.
std::optional<struct flock> foreign_lock(Descriptor& file, off_t first, off_t length) noexcept;

// Byte 0, which a process locks to create, replace or register. The wait is bounded: the holder may be stopped.
class RegistrationLock {
 public:
  RegistrationLock(Descriptor& file, const std::string& path);  // throws ArbiterError
  RegistrationLock(const RegistrationLock&) = delete;
  RegistrationLock& operator=(const RegistrationLock&) = delete;
  ~RegistrationLock() { unlock(file_, kRegistrationByte); }

 private:
  Descriptor& file_;
};

// The slots that this process owns, in a page that a fork wipes: a child owns none. The process id is compared too, for
// kernels that cannot wipe. The id alone would not do, since a child in a new pid namespace may have its parent's id.
class Ownership {
 public:
  Ownership();  // throws ArbiterError
  Ownership(const Ownership&) = delete;
  Ownership& operator=(const Ownership&) = delete;
  ~Ownership();

  bool by_this_process() const noexcept { return page_->pid.load(std::memory_order_relaxed) == getpid(); }
  std::atomic<std::uint64_t>& slots() const noexcept { return page_->slots; }

 private:
  struct Page {
    std::atomic<pid_t> pid;
    std::atomic<std::uint64_t> slots;
  };
  Page* page_;
};

// The client's values at the claim of its slot, to write them anew.
struct Record {
  Class client_class = Class::kNormal;
  bool hook_attached = true;
  std::int64_t claimed_ns = 0;
  std::uint64_t job = 0;
  std::atomic<std::int32_t> priority{0};
  std::atomic<std::int64_t> slo_ns{0};
  std::atomic<std::uint32_t> weight_milli{kEvenWeightMilli};
  std::array<char, 64> name{};
};

// One Table's claims in a file, and its pending reports. Guarded by File::slots, but for `claimed`.
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

// One table that is open. All Tables of one file in a process share one File, since closing any descriptor of the file
// would drop all locks of the process. After a move to another file, the places before stay open: other threads may be
// about to use their numbers.
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
  ~File();

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
  std::vector<Descriptor> spare;  // further descriptors of the same file, opened by accident, closed with the first
  Ownership mine;
  std::mutex registration;  // held around byte 0
  std::mutex slots;         // held while slot locks change; never while waiting for another process
  std::array<Record, kSlotCount> records;
  std::vector<Claims*> tables;        // guarded by Registry::mutex and `slots`
  bool creates = false;               // the name is created where it is missing; guarded by Registry::mutex
  bool repaired_cut = false;          // the last repair was of the file's size; guarded by `slots`
  std::string fault;                  // of the last attempt to follow the name; guarded by `slots`
  std::int64_t name_seen_ns = 0;      // guarded by `slots`
  std::int64_t away_since_ns = 0;     // since when the name has stood for another file; guarded by `slots`
  std::atomic<int> cannot_extend{0};  // the errno for which the table was given up
};

// The files this process has open. A forked child starts another Registry and leaves its parent's as it is. Threads
// that the child does not have may hold the parent's mutexes, and the parent's descriptors may not be closed.
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

// An opened table: a File that the process has open already, or a new place and mapping.
struct Opened {
  File* known = nullptr;
  std::unique_ptr<Place> place;
  Layout* layout = nullptr;
};

// Finds the file among those open, or opens and checks it. With a device name, a missing file is created. One that is
// no table of this version is replaced if no process uses it. The caller holds the registry's mutex. Throws
// ArbiterError.
Opened open_place(Registry& registry, const std::string& directory_path, const std::string& name,
                  const std::string& path, std::optional<std::string_view> device_name);

// The same, as a file. The caller holds the registry's mutex.
File& open_file(Registry& registry, const std::string& directory_path, const std::string& name, const std::string& path,
                std::optional<std::string_view> device_name);

}  // namespace cudasched::arbiter
