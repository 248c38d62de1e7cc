// The other GPUs of a job, as the gate of one GPU sees them. One a device, for its best-effort client.
//
// A job is one process with several GPUs, or the processes that share MASTER_ADDR and MASTER_PORT, or the setting
// `job`. A job's collectives hold up every GPU while one member waits at a gate, so the job's gates close and open
// together. Each is closed while latency work is active, or announced, on any GPU on which the job has a best-effort
// client. No launch ever waits for another member's launch; launches that latency work does not hold back go
// (docs/order.md).
//
// Nothing is agreed between members. Each has the job's id in its slot, and each reads the tables of the run directory
// to find on which GPUs the id is. A member that dies loses its slot, and with it its GPU leaves the job.
//
// Threads: refresh() is the ticker's, and called at registration; reap() is called by threads that wait at the gate.
// Everything else is lock-free; any(), latency_clients() and for_each() make no system call.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arbiter/table.hpp"
#include "schedule/neighbours.hpp"
#include "schedule/rendezvous.hpp"

namespace cudasched::runtime {

// The id of this process's job: by `setting` ("auto", "off" or a name), MASTER_ADDR and MASTER_PORT, else of this
// process alone where it may use several GPUs. 0: no job.
std::uint64_t job_id(const std::string& setting, int device_count);

class JobPeers {
 public:
  static constexpr int kMost = schedule::JobTables::kMost;  // other GPUs

  // Once, before the gate asks. `own`: this GPU's table, beside which the others are.
  void join(std::uint64_t job, const arbiter::Table& own);

  // Looks on which GPUs the job is now, every 5 ms at most.
  void refresh(std::int64_t now_ns) noexcept;

  bool any() const noexcept { return tables_.members.load(std::memory_order_relaxed) != 0; }

  // Is a latency client on any other GPU of the job?
  bool latency_clients() const noexcept {
    bool found = false;
    for_each([&](const arbiter::Table& table) { found = found || table.latency_clients() != 0; });
    return found;
  }

  // Calls visit(table) for each other GPU of the job.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    tables_.for_each(visit);
  }
  const schedule::JobTables& tables() const noexcept { return tables_; }

  // How far the other members are in the job's collectives.
  schedule::JobProgress progress() const noexcept;

  // The table whose end of latency work is to be slept for: `own`, unless latency work is active on another GPU alone.
  arbiter::Table& holder(arbiter::Table& own) const noexcept;

  // The calling thread is about to sleep for that table, of another GPU. The call stands between the thread's read of
  // wake_sequence and its last look whether it has to sleep. A wake-up between the two either changes the sequence or
  // finds this said.
  static void announce(arbiter::Table& holder) noexcept { holder.layout().distant_waiters.store(1); }

  // Gives back dead clients' slots on the other GPUs, and looks anew which GPUs are the job's.
  void reap() noexcept;

  // Threads that sleep for latency work on another GPU look again.
  void wake_all() const noexcept;

 private:
  static constexpr std::int64_t kRefreshNs = 5'000'000;
  static constexpr std::int64_t kReapNs = 100'000'000;
  static constexpr std::int64_t kScanNs = 1'000'000'000;

  // mutex_ is held by the callers of these.
  void find_tables(std::int64_t now_ns);
  void find_members() noexcept;

  std::uint64_t job_ = 0;
  std::string directory_;
  std::string own_name_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<arbiter::Table>> opened_;
  std::int64_t refreshed_ns_ = 0;
  std::int64_t reaped_ns_ = 0;
  std::int64_t scanned_ns_ = 0;
  timespec directory_changed_{};
  schedule::JobTables tables_;
};

}  // namespace cudasched::runtime
