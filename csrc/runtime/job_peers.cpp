#include "runtime/job_peers.hpp"

#include <dirent.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <string_view>

#include "base/clock.hpp"
#include "base/hash.hpp"

namespace cudasched::runtime {
namespace {

std::uint64_t hash_of(std::string_view kind, std::string_view text) noexcept {
  std::uint64_t hash = 0;
  for (const std::string_view part : {kind, text}) {
    for (const char c : part) hash = mix(hash, static_cast<unsigned char>(c));
    hash = mix(hash, part.size());
  }
  return std::max<std::uint64_t>(hash, 1);
}

std::uint64_t random_id() noexcept {
  std::uint64_t id = 0;
  if (getrandom(&id, sizeof id, GRND_NONBLOCK) != sizeof id) {
    id = mix(static_cast<std::uint64_t>(getpid()), static_cast<std::uint64_t>(now_ns()));
  }
  return std::max<std::uint64_t>(id, 1);
}

// Calls visit(slot) for each member of the job on that GPU.
template <typename Visit>
void for_each_member(const arbiter::Table& table, std::uint64_t job, Visit&& visit) noexcept {
  const arbiter::Layout& layout = table.layout();
  for (std::uint64_t rest = layout.best_effort.load(std::memory_order_acquire); rest != 0; rest &= rest - 1) {
    const arbiter::Slot& client = layout.slots[static_cast<std::size_t>(__builtin_ctzll(rest))];
    if (client.job.load(std::memory_order_relaxed) == job && client.occupied.load(std::memory_order_relaxed) != 0) {
      visit(client);
    }
  }
}

bool has_member(const arbiter::Table& table, std::uint64_t job) noexcept {
  bool found = false;
  for_each_member(table, job, [&](const arbiter::Slot&) { found = true; });
  return found;
}

}  // namespace

std::uint64_t job_id(const std::string& setting, int device_count) {
  if (setting == "off") return 0;
  if (setting != "auto") return hash_of("job", setting);
  const char* const address = std::getenv("MASTER_ADDR");
  const char* const port = std::getenv("MASTER_PORT");
  if (address != nullptr && port != nullptr && *address != '\0' && *port != '\0') {
    return hash_of("master", std::string(address) + ":" + port);
  }
  return device_count > 1 ? random_id() : 0;
}

void JobPeers::join(std::uint64_t job, const arbiter::Table& own) {
  const std::scoped_lock lock(mutex_);
  const std::string& path = own.path();
  const std::size_t slash = path.rfind('/');
  directory_ = slash == std::string::npos ? "." : path.substr(0, slash);
  own_name_ = slash == std::string::npos ? path : path.substr(slash + 1);
  job_ = job;
}

void JobPeers::find_tables(std::int64_t now) {
  struct stat status {};
  const bool changed = stat(directory_.c_str(), &status) == 0 && (status.st_mtim.tv_sec != directory_changed_.tv_sec ||
                                                                  status.st_mtim.tv_nsec != directory_changed_.tv_nsec);
  if (!changed && now - scanned_ns_ < kScanNs) return;
  directory_changed_ = status.st_mtim;
  scanned_ns_ = now;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(directory_.c_str()), &closedir);
  if (directory == nullptr) return;
  while (const dirent* const entry = readdir(directory.get())) {
    const std::string name = entry->d_name;
    const std::string path = directory_ + "/" + name;
    const bool known =
        std::any_of(opened_.begin(), opened_.end(), [&](const auto& table) { return table->path() == path; });
    if (!name.ends_with(".arbiter") || name == own_name_ || known || opened_.size() == kMost) continue;
    try {
      auto table = arbiter::Table::open_existing(path);
      // Tables of MIG instances that are gone stay in the directory: half of the places are for those in use.
      if (opened_.size() >= kMost / 2 && table->layout().best_effort.load(std::memory_order_relaxed) == 0) continue;
      opened_.reserve(kMost);
      tables_.tables[opened_.size()] = table.get();
      opened_.push_back(std::move(table));
    } catch (const std::exception&) {
      // No table, or one of another version: no client of it can be of this job.
    }
  }
}

void JobPeers::find_members() noexcept {
  std::uint32_t members = 0;
  for (std::size_t i = 0; i < opened_.size(); ++i) {
    if (!opened_[i]->lost() && has_member(*opened_[i], job_)) members |= std::uint32_t{1} << i;
  }
  tables_.members.store(members, std::memory_order_release);
}

void JobPeers::refresh(std::int64_t now) noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || job_ == 0 || (refreshed_ns_ != 0 && now - refreshed_ns_ < kRefreshNs)) return;
  refreshed_ns_ = now;
  try {
    find_tables(now);
  } catch (const std::exception&) {
    // No memory: those that are known will do.
  }
  const bool reaps = now - reaped_ns_ >= kReapNs;
  if (reaps) reaped_ns_ = now;
  for (const auto& table : opened_) {
    table->tend(now);
    if (reaps) table->reap();
  }
  find_members();
}

schedule::JobProgress JobPeers::progress() const noexcept {
  schedule::JobProgress progress;
  for_each([&](const arbiter::Table& table) {
    for_each_member(table, job_, [&](const arbiter::Slot& client) {
      progress.add(client.collectives.load(std::memory_order_acquire));
    });
  });
  return progress;
}

arbiter::Table& JobPeers::holder(arbiter::Table& own) const noexcept {
  arbiter::Table* found = &own;
  if ((own.active() & own.latency_clients()) != 0) return own;
  for_each([&](arbiter::Table& table) {
    if (found == &own && (table.active() & table.latency_clients()) != 0) found = &table;
  });
  return *found;
}

void JobPeers::reap() noexcept {
  if (!any()) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  for_each([](arbiter::Table& table) { table.reap(); });
  find_members();
}

void JobPeers::wake_all() const noexcept {
  for_each([](arbiter::Table& table) {
    if (table.layout().distant_waiters.load() != 0) table.wake_all();
  });
}

}  // namespace cudasched::runtime
