#include "arbiter/table.hpp"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <system_error>
#include <type_traits>
#include <utility>

#include "arbiter/table_file.hpp"
#include "arbiter/words.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/futex.hpp"
#include "base/sleep.hpp"

namespace cudasched::arbiter {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::int64_t>::is_always_lock_free &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "a lock inside an atomic would not reach another process");
static_assert(std::is_standard_layout_v<Slot> && sizeof(Slot) == 448 && offsetof(Slot, name) == 240 &&
              offsetof(Slot, job) == 336 && offsetof(Slot, segment) == 360);
static_assert(std::is_standard_layout_v<Layout> && sizeof(Counts) == 13952 && sizeof(SharedCounts) == 27968 &&
              sizeof(SlotMemory) == 192 && sizeof(MemoryBoard) == 64 + kSlotCount * sizeof(SlotMemory) &&
              sizeof(Layout) == 29120 + kSlotCount * sizeof(SharedCounts) + sizeof(MemoryBoard));
static_assert(offsetof(Layout, active) == 128 && offsetof(Layout, latency) == 192 && offsetof(Layout, waiting) == 256 &&
              offsetof(Layout, wake_sequence) == 264 && offsetof(Layout, turn) == 320 &&
              offsetof(Layout, slots) == 448 && offsetof(Layout, counts) == 29120);

namespace {

constexpr int kClaimAttempts = 5;
constexpr std::int64_t kNameLookNs = 10 * kNsPerMs;  // between two checks of the file's name
constexpr std::int64_t kFollowNs = 50 * kNsPerMs;    // latency clients move first, so that the others find them

bool header_is_sound(const File& file) noexcept {
  const Layout& layout = *file.layout;
  return layout.magic == Layout::kMagic && layout.layout_version == kLayoutVersion && layout.bytes == sizeof(Layout) &&
         layout.device_name == file.device_name;
}

// Gives the file its size and header again; clients' words that were cut off are lost. Where there is no room, memory
// of the process's own takes the file's place, and the table is lost. The caller holds file.slots.
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

// Moves from a file that was deleted or replaced to the file that has the name now, or creates one. The clients of this
// process keep their records. Throws ArbiterError; false: not at this moment. The caller holds the registry's mutex.
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
    layout->counts[static_cast<std::size_t>(target)].clear();
    layout->memory.slots[static_cast<std::size_t>(target)].clear();
    Slot& entry = layout->slots[static_cast<std::size_t>(target)];
    copy_slot(entry, before.slots[static_cast<std::size_t>(slot)]);
    now_own |= bit_of(target);
    if ((before.active.load() & bit_of(slot)) != 0) layout->active.fetch_or(bit_of(target));
    if ((before.waiting.load() & bit_of(slot)) != 0) layout->waiting.fetch_or(bit_of(target));
  }
  // Our words in the old file stay. Clients still in that file go on holding back for an active latency client, until
  // they have moved as well or its heartbeat is stale.
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
    target.weight_milli.store(source.weight_milli.load());
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

// Does the name stand for another file? Where it stands for none, but the file still has a name, all clients have moved
// along, or this process has another root directory.
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
  const std::lock_guard lock(registry.mutex);  // no thread opens the file anew while we close it, nor follows its name
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
    if (attempt > 0) sleep_ns(kNsPerMs);  // a reaper may hold the lock of a dead client's slot for a moment
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
      record.weight_milli.store(client.weight_milli);
      copy_text(record.name, client.name);
      entry.client_class.store(static_cast<std::uint32_t>(client.client_class));
      entry.regions.store(0);
      entry.process_class.store(static_cast<std::uint32_t>(client.client_class));
      entry.policy.store(0);
      entry.heartbeat_ns.store(now);
      for (auto* const time :
           {&entry.active_since_ns,  &entry.deadline_ns,        &entry.in_flight_until_ns, &entry.overdue_since_ns,
            &entry.last_launch_ns,   &entry.entered_ns,         &entry.expected_ns,        &entry.admitted_at_entry_ns,
            &entry.hint_until_ns,    &entry.foreseen_ns,        &entry.foreseen_over_ns,   &entry.rate_free_ns,
            &entry.request_ns,       &entry.request_waited_ns,  &entry.virtual_ns,         &entry.policy_since_ns,
            &entry.segment_since_ns, &entry.segment_late_ns,    &entry.segment_median_ns,  &entry.latency_gpu_ns,
            &entry.latency_done_ns,  &entry.latency_not_done_ns}) {
        time->store(0);
      }
      for (auto* const count : {&entry.launches, &entry.device_launches, &entry.gate_waits, &entry.gate_wait_ns,
                                &entry.requests, &entry.segment, &entry.segment_left, &entry.collectives}) {
        count->store(0);
      }
      counts(index).clear();
      memory(index).clear();
      control::renew(entry.control);
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

void Table::set_weight(int slot, std::uint32_t weight_milli) noexcept {
  if (!state_->owns(slot)) return;
  state_->file.records[static_cast<std::size_t>(slot)].weight_milli.store(weight_milli);
  this->slot(slot).weight_milli.store(weight_milli, std::memory_order_relaxed);
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
  sleep_at(layout_->wake_sequence, seen, timeout_ns);
}

void Table::sleep_at(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t timeout_ns) noexcept {
  if (timeout_ns <= 0) return;
  futex_sleep(word, seen, timeout_ns, Sharing::kShared);
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

bool Table::ask_for_memory(int slot, std::uint64_t number, std::uint64_t bytes, std::int64_t until_ns,
                           bool moves) noexcept {
  if (!state_->usable() || !state_->owns(slot)) return false;
  SlotMemory& words = memory(slot);
  words.request_bytes.store(bytes, std::memory_order_relaxed);
  words.request_until_ns.store(until_ns, std::memory_order_relaxed);
  words.request_moves.store(moves ? 1 : 0, std::memory_order_relaxed);
  words.request.store(number, std::memory_order_release);
  layout_->memory.requests.fetch_or(bit_of(slot));
  return true;
}

void Table::end_request_for_memory(int slot) noexcept {
  if (state_->usable() && state_->owns(slot)) layout_->memory.requests.fetch_and(~bit_of(slot));
}

void Table::sleep_for_memory(std::uint32_t seen, std::int64_t timeout_ns) noexcept {
  sleep_at(layout_->memory.sequence, seen, timeout_ns);
}

void Table::wake_for_memory() noexcept { wake_memory(*layout_); }

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
