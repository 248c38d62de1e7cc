// The device's other clients as one best-effort client's gate sees them at each look, from the arbiter's words: active
// latency work, the slack of requests, foreseen work, the turn. And this client's words for their gates.
//
// The words may be stale, foreign or damaged. A bit of another client counts only in an occupied slot of the bit's
// class.
//
// Latency work on any GPU of the client's job counts as latency work of this GPU, with slack, hints and foreseen work.
// Turns, shares and the time in flight are this GPU's.
//
// Pure: no clock, no driver, no system call. Not thread-safe but for latency_active(): the caller holds a lock.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "arbiter/table.hpp"
#include "schedule/admission.hpp"
#include "schedule/gate_settings.hpp"
#include "schedule/host_bound.hpp"
#include "schedule/lead.hpp"
#include "schedule/rendezvous.hpp"

namespace cudasched::schedule {

// The tables of the other GPUs of a client's job. One thread adds to them; any thread reads.
struct JobTables {
  static constexpr int kMost = 31;

  // Calls visit(table) for each of them.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (std::uint32_t rest = members.load(std::memory_order_acquire); rest != 0; rest &= rest - 1) {
      visit(*tables[static_cast<std::size_t>(__builtin_ctz(rest))]);
    }
  }

  std::array<arbiter::Table*, kMost> tables{};  // a table's place is written before its bit in `members`
  std::atomic<std::uint32_t> members{0};        // those on which the job is
};

// The least slack of the active requests of a GPU's latency clients but one (-1: of all). kUnknownNs: one of them has
// no deadline, or no known time, or none is active. Any thread.
std::int64_t other_requests_slack_ns(const arbiter::Layout& table, int own_slot, std::int64_t stale_heartbeat_ns,
                                     std::int64_t now_ns) noexcept;

class Neighbours {
 public:
  // `mps`: clients of several processes run at once, and none takes turns.
  void join(arbiter::Layout* layout, int slot, bool mps, const GateSettings& settings) noexcept;

  // The other GPUs of its job; null: none. Before the first look.
  void use_peers(const JobTables* peers) noexcept { peers_ = peers; }

  // The policy looks into the gaps of requests, or does so no more.
  void look_into_requests(bool looks) noexcept { looks_into_requests_ = looks; }

  // The client has another slot now.
  void moved(int slot) noexcept { slot_ = slot; }

  // Restores this client's words in a damaged arbiter.
  void write_again() noexcept;

  // A latency client with a fresh heartbeat holds the gate closed, on this GPU or another one of the job. Any thread.
  bool latency_active(std::int64_t now_ns) const noexcept;

  // Completes a snapshot, whose in_flight_ns is this client's own and grows under MPS.
  // `turn_waited_ns`: how long the launch has waited for its turn. True: the turn was passed on, and those that wait
  // are to look.
  bool look(Snapshot& snapshot, std::int64_t now_ns, std::int64_t turn_waited_ns) noexcept;

  // The slot of this process's latency client, -1: it has none. Work in the same context takes no turns with this
  // client's.
  void note_own_latency(int slot) noexcept { own_latency_ = slot; }

  // A launch asks, and nothing of this client is in flight: where it has been idle for long, no time is owed to it.
  void rejoined(std::int64_t now_ns) noexcept;

  // A launch is to be admitted by the snapshot of the last look. `own_latency_slot`: of this process's latency client,
  // -1 if there is none. False: another gate was quicker to take from the slack that was seen. Then nothing is noted,
  // and the launch has to look anew.
  bool admitted(const Snapshot& seen, int own_latency_slot) noexcept;

  // Work in flight is predicted to last until then.
  void publish(std::int64_t in_flight_until_ns) noexcept;

  // A collective of the job: it is at the gate; how it may go on; it is submitted, with or without the other two. The
  // last is true where another member was not there in time.
  void collective_arrived(std::int64_t now_ns) noexcept;
  Rendezvous::Verdict look_for_members(const JobProgress& members, std::int64_t now_ns) noexcept {
    return rendezvous_.look(members, now_ns);
  }
  bool collective_submitted(std::int64_t now_ns) noexcept;

  // Tells the lead of the latency requests that were completed since the last time.
  void report_requests(Lead& lead) noexcept;

  bool feeds_with_others() const noexcept { return mps_; }

 private:
  // This GPU's, and those of the job's other GPUs.
  template <typename Visit>
  void for_each_table(Visit&& visit) const {
    visit(*layout_);
    if (peers_ != nullptr) peers_->for_each([&](const arbiter::Table& table) { visit(table.layout()); });
  }
  void publish_collectives() noexcept;
  bool look_at_segments(std::int64_t now_ns) noexcept;
  void look_into_gaps(Snapshot& snapshot) noexcept;
  std::uint64_t other_best_effort() const noexcept;
  std::uint64_t waiting(std::int64_t now_ns) const noexcept;
  bool idle(int slot, std::int64_t now_ns) const noexcept;
  void look_ahead(const arbiter::Layout& table, Snapshot& snapshot, std::int64_t now_ns) const noexcept;
  bool take_from_slack(const Snapshot& seen, int own_latency_slot) noexcept;
  const std::int64_t* virtual_times(std::uint64_t slots, std::int64_t now_ns) noexcept;
  bool my_turn(std::int64_t now_ns, bool& passed_on) noexcept;
  bool fresh(int slot, std::int64_t now_ns) const noexcept;
  bool fresh(const arbiter::Slot& client, std::int64_t now_ns) const noexcept;
  arbiter::Slot& own_slot() noexcept { return layout_->slots[static_cast<std::size_t>(slot_)]; }

  arbiter::Layout* layout_ = nullptr;
  const JobTables* peers_ = nullptr;
  int slot_ = -1;
  bool mps_ = false;
  std::int64_t stale_heartbeat_ns_ = 0;
  std::int64_t turn_ns_ = 0;
  std::int64_t looked_ns_ = 0;    // 0: not yet
  std::uint64_t active_ = 0;      // slots of the latency clients that the last look saw active on this GPU,
  std::int64_t admitted_ns_ = 0;  // and the work that look saw admitted beside these clients
  Rendezvous rendezvous_;
  std::uint64_t turn_word_ = 0;      // the last turn that this client began,
  std::int64_t turn_used_ns_ = 0;    // and the predicted time of the launches admitted in the turn
  std::int64_t own_virtual_ns_ = 0;  // as this client's slot has them
  std::int64_t own_in_flight_until_ns_ = 0;
  bool looks_into_requests_ = false;
  int own_latency_ = -1;
  GapView gaps_;
  std::uint64_t admitted_launches_ = 0;  // ever,
  std::int64_t admitted_gpu_ns_ = 0;     // and their predicted time
  std::array<std::int64_t, arbiter::kSlotCount> virtual_ns_{};
  std::array<std::uint64_t, arbiter::kSlotCount> requests_seen_{};
};

}  // namespace cudasched::schedule
