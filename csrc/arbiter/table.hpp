// The clients of one GPU, in one shared-memory file for each GPU and user: which processes use it, with which class,
// which are active, how much time is in flight. There is no server. Crash-safe: every word has one writer or is a
// bitmap of slots, so a process killed at any instruction leaves nothing wrong that its own slot's lock does not tell.
//
// Liveness is a POSIX record lock on one byte of the file for each slot: gone with the process, not inherited by fork,
// true across pid namespaces. Such locks belong to the process and fall when *any* descriptor of the file is closed, so
// all Tables of one file in a process share one descriptor; nothing else in the process may open and close the file.
// A host program that closes descriptors it did not open takes the locks away, and the number may become a file of its
// own. That is looked at before each use of it; the table is then lost for this process, which is said by check() and
// lost(): it touches neither file nor slots any more, claim throws, and what would change a slot does nothing.
// A forked child must not use its parent's Table: there claim throws, and what would change a slot does nothing.
//
// The file belongs to the user, whose programs may damage, cut short or delete it. tend(), which the ticker calls,
// repairs that: a file cut short is extended, a damaged header and the words of this Table's clients are written anew,
// and a file that was deleted or replaced is followed to the one that its name stands for now. The new file takes the
// old one's place at the same address, so references into the layout stay valid; slot numbers may change.
//
// Threads: every function may be called from any thread. set_active, clear_active, active, latency_clients and the
// slot's atomics are lock-free and make no system call, except that clear_active wakes sleepers if there are any.
// claim, release, reap and tend take a mutex of the process and make system calls.
#pragma once

#include <string.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "arbiter/control.hpp"
#include "arbiter/counters.hpp"
#include "arbiter/memory_board.hpp"
#include "base/class.hpp"

namespace cudasched::arbiter {

inline constexpr int kSlotCount = 64;
inline constexpr std::uint32_t kLayoutVersion = 11;
static_assert(sizeof(Counts) == 13'944, "other counts (counts.inc) are another layout: change kLayoutVersion, too");
inline constexpr int kTurnSlotShift = 56;
inline constexpr std::uint32_t kOwnPolicy = 255;
inline constexpr std::uint32_t kEvenWeightMilli = 1000;

// What a client says of itself. Written by its owner alone (by a reaper, holding the slot's lock, once the owner is
// gone), but for `control`. Times are CLOCK_MONOTONIC nanoseconds; 0 means none.
struct alignas(64) Slot {
  std::atomic<std::uint32_t> occupied;      // 1 from claim to release
  std::atomic<std::uint32_t> client_class;  // Class
  std::atomic<std::int32_t> priority;
  std::atomic<std::int32_t> pid;       // for display only
  std::atomic<std::uint32_t> regions;  // regions open now
  std::atomic<std::uint32_t> hook_attached;
  std::atomic<std::uint32_t> process_class;     // Class of the process's launches that no region and no stream decides
  std::atomic<std::uint32_t> policy;            // its place in schedule::policies(); kOwnPolicy: the program's own
  std::atomic<std::uint32_t> weight_milli;      // of its share among best-effort clients, in thousandths
  std::atomic<std::uint32_t> time_slice_us;     // of its contexts on the GPU; 0: libcuda's own
  std::atomic<std::uint32_t> time_slice_state;  // preempt::State
  std::atomic<std::uint64_t> control;           // changes that other processes ask for: all write (control.hpp)
  std::atomic<std::int64_t> claimed_ns;
  std::atomic<std::int64_t> heartbeat_ns;
  std::atomic<std::int64_t> slo_ns;  // the client's own target, 0: none
  std::atomic<std::int64_t> active_since_ns;
  std::atomic<std::int64_t> deadline_ns;         // the earliest of its open regions
  std::atomic<std::int64_t> in_flight_until_ns;  // when its submitted work is predicted to be done
  std::atomic<std::int64_t>
      overdue_since_ns;  // when its oldest launch in flight should have been done; 0: none is late
  std::atomic<std::int64_t> last_launch_ns;
  std::atomic<std::uint64_t> launches;         // seen by the hook, of this class
  std::atomic<std::uint64_t> device_launches;  // run by the device as CUPTI counted them, 0: not counted
  std::atomic<std::uint64_t> gate_waits;
  std::atomic<std::uint64_t> gate_wait_ns;
  // Of latency clients (schedule/requests.hpp):
  std::atomic<std::int64_t> entered_ns;            // when the request under way began
  std::atomic<std::int64_t> expected_ns;           // what it takes in all by itself; 0: not known
  std::atomic<std::int64_t> admitted_at_entry_ns;  // Layout::admitted_ns then
  std::atomic<std::int64_t> hint_until_ns;         // the client said that it comes: best effort holds until then
  std::atomic<std::int64_t> foreseen_ns;           // when its next work is foreseen, at the earliest,
  std::atomic<std::int64_t> foreseen_over_ns;      // and when that has come or stayed away
  std::atomic<std::int64_t> rate_free_ns;          // by its rate, none comes within this time of any moment
  std::atomic<std::uint64_t> requests;             // completed; of the last one:
  std::atomic<std::int64_t> request_ns;            // how long it took
  std::atomic<std::int64_t> request_waited_ns;     // and how much best-effort work was in flight when it began
  // Of best-effort clients:
  std::atomic<std::int64_t> virtual_ns;       // the GPU time that it was given, by its share (schedule/fair.hpp)
  std::array<char, 64> name;                  // program name, NUL-terminated; written before occupied
  std::array<char, 32> version;               // cudasched version of the client
  std::atomic<std::uint64_t> job;             // the job whose GPUs are gated together (runtime/job_peers.hpp); 0: none
  std::atomic<std::uint64_t> collectives;     // how far it is in the job's collectives (schedule/rendezvous.hpp)
  std::atomic<std::int64_t> policy_since_ns;  // since when the client's own policy has not answered; 0: it does
  // Of latency clients whose requests best effort may run beside (runtime/latency/segments.hpp). The last four change
  // with launches; no other client writes on their cache line.
  std::atomic<std::uint64_t> segment;          // segments begun, ever; the last one is under way
  std::atomic<std::int64_t> segment_since_ns;  // when it began
  std::atomic<std::int64_t> segment_late_ns;   // by how much it may end later; 0: nothing is known, or it is kept clean
  std::atomic<std::int64_t> segment_median_ns;    // what it takes
  std::atomic<std::int64_t> latency_gpu_ns;       // expected GPU time of all that it launched, ever
  std::atomic<std::uint64_t> segment_left;        // what is still to come in the segment (schedule/segment_profile.hpp)
  std::atomic<std::int64_t> latency_done_ns;      // of latency_gpu_ns, what is complete (schedule/host_bound.hpp)
  std::atomic<std::int64_t> latency_not_done_ns;  // and from where on it was not when that was last asked for
};

// The file, byte for byte. Changing it changes kLayoutVersion.
struct Layout {
  static constexpr std::uint64_t kMagic = 0x3144'4548'4353'5543;  // "CUSCHED1"

  std::uint64_t magic;
  std::uint32_t layout_version;
  std::uint32_t bytes;
  std::array<char, 64> device_name;
  alignas(64) std::atomic<std::uint64_t> active;      // slots of latency clients that hold the gate closed
  alignas(64) std::atomic<std::uint64_t> latency;     // slots of latency clients
  std::atomic<std::uint64_t> best_effort;             // slots of best-effort clients
  alignas(64) std::atomic<std::uint64_t> waiting;     // slots of best-effort clients that wait at the gate now
  std::atomic<std::uint32_t> wake_sequence;           // futex: changes when the gate may have opened
  std::atomic<std::uint32_t> distant_waiters;         // 1: clients on other GPUs sleep on wake_sequence, too
  alignas(64) std::atomic<std::uint64_t> turn;        // which best-effort client feeds the GPU (schedule/turn.hpp):
                                                      // upper 8 bits slot + 1 (0: none), below when it ends, in us
  alignas(64) std::atomic<std::int64_t> admitted_ns;  // best-effort work let in beside latency work, ever; all add
  std::array<Slot, kSlotCount> slots;
  std::array<SharedCounts, kSlotCount> counts;  // of each slot's process; nothing is decided by them
  MemoryBoard memory;
};

// The text of a fixed field, which in a damaged file may have no NUL.
template <std::size_t N>
std::string text(const std::array<char, N>& field) {
  return {field.data(), strnlen(field.data(), N)};
}

struct ClientInfo {
  Class client_class = Class::kNormal;
  std::int32_t priority = 0;
  std::uint32_t weight_milli = kEvenWeightMilli;
  std::int64_t slo_ns = 0;
  std::string name;
  bool hook_attached = true;
  std::uint64_t job = 0;
};

// What tend() found, and what it did about it.
enum class Condition : std::uint8_t {
  kSound,
  kRepaired,  // the file had been cut short, or its header damaged; every client writes its own words anew
  kMoved,     // it had been deleted or replaced: the clients are in the file of that name now; see slot_now()
  kStranded,  // it had been deleted or replaced, and there is no other to move to, as why() says; said once, tried
              // again
  kLost,      // it cannot be used any more, as why_lost() says
};

class Table {
 public:
  // Opens the table of one device, creating it if needed. `directory` is created with mode 0700 if it is missing; it
  // must belong to this user and be writable by no other. `device_uuid` ("GPU-...") names the file.
  // Throws ArbiterError: the directory is someone else's, the filesystem is full or read-only, the file is not a table,
  // or it has another layout version while live clients use it (without live clients it is replaced).
  static std::unique_ptr<Table> open(const std::string& directory, const std::string& device_uuid,
                                     std::string_view device_name);

  // Opens a table to look at it: creates nothing, claims nothing. Throws ArbiterError as above, or if it is missing.
  static std::unique_ptr<Table> open_existing(const std::string& path);

  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // A slot for a new client; dead clients' slots are given back first. Throws ArbiterError if 64 clients live, if the
  // table is lost, if the file was removed or replaced since it was opened, or if a stopped process holds up
  // registration (after 5 s).
  int claim(const ClientInfo& client);
  // Only of a slot claimed through this Table; so set_active and clear_active. The destructor releases all of them.
  void release(int slot) noexcept;

  // Also when its words are written anew.
  void set_priority(int slot, std::int32_t priority) noexcept;
  void set_slo(int slot, std::int64_t slo_ns) noexcept;
  void set_weight(int slot, std::uint32_t weight_milli) noexcept;

  // The client holds the gate closed from here on / no longer does. clear_active wakes the gates if it was the last.
  void set_active(int slot, std::int64_t now_ns) noexcept;
  void clear_active(int slot) noexcept;

  std::uint64_t active() const noexcept { return layout_->active.load(); }
  std::uint64_t latency_clients() const noexcept { return layout_->latency.load(std::memory_order_relaxed); }

  // Keeps the table usable: repairs the file, follows its name, and writes anew what this Table's clients are. Two
  // system calls where nothing is wrong. kRepaired and kMoved are said once to each Table of the file. Processes
  // without a latency client follow 50 ms later, so that they find those that hold them back; `at_once`: without that
  // delay.
  Condition tend(std::int64_t now_ns, bool at_once = false) noexcept;

  // Where a slot claimed through this Table is since tend() last said kMoved.
  int slot_now(int claimed_slot) const noexcept;

  // Of kRepaired and kStranded.
  std::string why() const;

  // Does the program still have the table's descriptor? One system call; lost() tells what was found last, without one.
  bool check() noexcept;
  bool lost() const noexcept;
  std::string why_lost() const;

  // Is the owner of this slot a living process (this one included)? Two system calls at most. Of a lost table: no.
  bool alive(int slot) const noexcept;

  // Gives back the slots of dead clients among `candidates` (a bitmap), clears their bits everywhere and wakes the
  // gates; of living ones it clears the bits that a client of their class does not have. Returns how many it gave back.
  int reap(std::uint64_t candidates = ~std::uint64_t{0}) noexcept;

  // Sleeps until wake_sequence differs from `seen`, at most `timeout_ns`. May return early. Before it read `seen`, the
  // caller's bit in `waiting` must be set, or distant_waiters. A file that was cut short meanwhile is extended.
  void sleep(std::uint32_t seen, std::int64_t timeout_ns) noexcept;
  void wake_all() noexcept;

  // The client asks for memory from here on (arbiter/memory_board.hpp) / no longer does. Nothing, where the slot is not
  // one of this Table's any more: it may be another client's, which asks, too. False: it does not ask.
  bool ask_for_memory(int slot, std::uint64_t number, std::uint64_t bytes, std::int64_t until_ns) noexcept;
  void end_request_for_memory(int slot) noexcept;

  // The same for MemoryBoard::sequence.
  void sleep_for_memory(std::uint32_t seen, std::int64_t timeout_ns) noexcept;
  void wake_for_memory() noexcept;

  // In a forked child: forget the parent's slots without touching the file.
  void abandon() noexcept;

  Layout& layout() noexcept { return *layout_; }
  const Layout& layout() const noexcept { return *layout_; }
  Slot& slot(int index) noexcept { return layout_->slots[static_cast<std::size_t>(index)]; }
  SlotMemory& memory(int index) noexcept { return layout_->memory.slots[static_cast<std::size_t>(index)]; }
  SharedCounts& counts(int index) noexcept { return layout_->counts[static_cast<std::size_t>(index)]; }
  const std::string& path() const noexcept { return path_; }

  static constexpr int kMostMoves = 8;

 private:
  struct State;  // descriptor, mutex, the slots that are ours
  Table(std::string path, Layout* layout, std::unique_ptr<State> state);
  void sleep_at(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t timeout_ns) noexcept;

  std::string path_;
  Layout* layout_;
  std::unique_ptr<State> state_;
};

// Where tables live: CUDASCHED_RUN_DIR, else /dev/shm/cudasched-<uid>.
std::string default_directory();

}  // namespace cudasched::arbiter
