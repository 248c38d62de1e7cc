// The clients of one GPU, in one shared-memory file for each GPU and user: the processes, their classes, which are
// active, how much time is in flight. There is no server. Crash-safe: every word has one writer or is a bitmap of
// slots. So after a process is killed at any instruction, its slot's lock tells all that it left wrong.
//
// Liveness is a POSIX record lock on one byte of the file for each slot. The lock is gone with the process, not
// inherited by fork, and true across pid namespaces. Such locks belong to the process and fall when *any* descriptor of
// the file is closed. So all Tables of one file in a process share one descriptor, and nothing else in the process may
// open and close the file. A host program that closes descriptors it did not open takes the locks away, and the number
// may become a file of its own. Each use of the descriptor checks for that first. The table is then lost for this
// process, as check() and lost() report. A lost table touches neither file nor slots, claim throws, and functions that
// change a slot do nothing. A forked child must not use its parent's Table: there claim throws, and functions that
// change a slot do nothing.
//
// The file belongs to the user, whose programs may damage, cut short or delete it. tend(), which the ticker calls,
// repairs such damage. It extends a file cut short, and writes a damaged header and the words of this Table's clients
// anew. From a file that was deleted or replaced, it moves to the file that has the name now. The new file takes the
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
inline constexpr std::uint32_t kLayoutVersion = 15;
static_assert(sizeof(Counts) == 13'952, "other counts (counts.inc) are another layout: change kLayoutVersion, too");
inline constexpr int kTurnSlotShift = 56;
inline constexpr std::uint32_t kOwnPolicy = 255;
inline constexpr std::uint32_t kEvenWeightMilli = 1000;

// One client's record. Only its owner writes it, but for `control`. Once the owner is gone, a reaper that holds the
// slot's lock writes it. Times are CLOCK_MONOTONIC nanoseconds; 0 means none.
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
  std::atomic<std::int64_t> deadline_ns;         // the earliest of all open regions
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
  std::atomic<std::int64_t> expected_ns;           // the request's whole time alone; 0: not known
  std::atomic<std::int64_t> admitted_at_entry_ns;  // Layout::admitted_ns then
  std::atomic<std::int64_t> hint_until_ns;         // best effort holds until then: the client announced a request, or,
                                                   // of a best-effort client, measures (schedule/quiet.hpp)
  std::atomic<std::int64_t> foreseen_ns;           // when its next work is foreseen, at the earliest,
  std::atomic<std::int64_t> foreseen_over_ns;      // and when that has come or stayed away
  std::atomic<std::int64_t> rate_free_ns;       // by the client's rate, no request comes within this time of any moment
  std::atomic<std::uint64_t> requests;          // completed; of the last one:
  std::atomic<std::int64_t> request_ns;         // the request's time
  std::atomic<std::int64_t> request_waited_ns;  // and how much best-effort work was in flight when it began
  // Of best-effort clients:
  std::atomic<std::int64_t> virtual_ns;       // the GPU time given, by share (schedule/fair.hpp)
  std::array<char, 64> name;                  // program name, NUL-terminated; written before occupied
  std::array<char, 32> version;               // cudasched version of the client
  std::atomic<std::uint64_t> job;             // the job whose GPUs are gated together (runtime/job_peers.hpp); 0: none
  std::atomic<std::uint64_t> collectives;     // how far it is in the job's collectives (schedule/rendezvous.hpp)
  std::atomic<std::int64_t> policy_since_ns;  // since when the client's own policy has not answered; 0: answers
  // Of latency clients whose requests best effort may run beside (runtime/latency/segments.hpp). The last four change
  // with launches; no other client writes on their cache line.
  std::atomic<std::uint64_t> segment;             // segments begun, ever; the last one is under way
  std::atomic<std::int64_t> segment_since_ns;     // when it began
  std::atomic<std::int64_t> segment_late_ns;      // how late the segment may end; 0: not known, or kept clean
  std::atomic<std::int64_t> segment_median_ns;    // the segment's median time
  std::atomic<std::int64_t> latency_gpu_ns;       // expected GPU time of all its launches, ever
  std::atomic<std::uint64_t> segment_left;        // the rest of the segment (schedule/segment_profile.hpp)
  std::atomic<std::int64_t> latency_done_ns;      // the complete part of latency_gpu_ns (schedule/host_bound.hpp)
  std::atomic<std::int64_t> latency_not_done_ns;  // and the point of the first incomplete launch at the last look
};

// The file, byte for byte. A change of the layout changes kLayoutVersion.
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

// The result of tend().
enum class Condition : std::uint8_t {
  kSound,
  kRepaired,  // the file had been cut short, or its header damaged; every client writes its own words anew
  kMoved,     // the file had been deleted or replaced: the clients are in the file of that name now; see slot_now()
  kStranded,  // the file had been deleted or replaced, and there is no other to move to (why()); reported once, tried
              // again
  kLost,      // the table cannot be used any more (why_lost())
};

class Table {
 public:
  // Opens the table of one device, creating it if needed. A missing `directory` is created with mode 0700; the
  // directory must belong to this user and be writable by no other. `device_uuid` ("GPU-...") names the file. Throws
  // ArbiterError: the directory belongs to another user, the filesystem is full or read-only, the file is not a table,
  // or live clients use a file of another layout version. Without live clients such a file is replaced.
  static std::unique_ptr<Table> open(const std::string& directory, const std::string& device_uuid,
                                     std::string_view device_name);

  // Opens a table to read: creates nothing, claims nothing. Throws ArbiterError as above, or if the file is missing.
  static std::unique_ptr<Table> open_existing(const std::string& path);

  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // A slot for a new client; dead clients' slots are given back first. Throws ArbiterError if 64 clients live, the
  // table is lost, the open file was removed or replaced, or a stopped process holds up registration (after 5 s).
  int claim(const ClientInfo& client);
  // Only of a slot claimed through this Table; so set_active and clear_active. The destructor releases all of them.
  void release(int slot) noexcept;

  // These also hold when the client's words are written anew.
  void set_priority(int slot, std::int32_t priority) noexcept;
  void set_slo(int slot, std::int64_t slo_ns) noexcept;
  void set_weight(int slot, std::uint32_t weight_milli) noexcept;

  // The client holds the gate closed from here on / no longer does. clear_active of the last active client wakes the
  // gates.
  void set_active(int slot, std::int64_t now_ns) noexcept;
  void clear_active(int slot) noexcept;

  std::uint64_t active() const noexcept { return layout_->active.load(); }
  std::uint64_t latency_clients() const noexcept { return layout_->latency.load(std::memory_order_relaxed); }

  // Keeps the table usable: repairs the file, follows its name, and writes the records of this Table's clients anew.
  // Two system calls where nothing is wrong. Each Table of the file gets kRepaired and kMoved once. Processes without a
  // latency client follow 50 ms later, to find the latency clients there already; `at_once`: without that delay.
  Condition tend(std::int64_t now_ns, bool at_once = false) noexcept;

  // Where a slot claimed through this Table is since tend() last said kMoved.
  int slot_now(int claimed_slot) const noexcept;

  // Of kRepaired and kStranded.
  std::string why() const;

  // Does the program still have the table's descriptor? One system call; lost() repeats the last result without one.
  bool check() noexcept;
  bool lost() const noexcept;
  std::string why_lost() const;

  // Is the owner of this slot a living process (this one included)? Two system calls at most. Of a lost table: no.
  bool alive(int slot) const noexcept;

  // Gives back the slots of dead clients among `candidates` (a bitmap), clears their bits everywhere and wakes the
  // gates. Of living clients, clears the bits that do not fit their class. Returns the number of slots given back.
  int reap(std::uint64_t candidates = ~std::uint64_t{0}) noexcept;

  // Sleeps until wake_sequence differs from `seen`, at most `timeout_ns`. May return early. Before it read `seen`, the
  // caller's bit in `waiting` must be set, or distant_waiters. A file that was cut short meanwhile is extended.
  void sleep(std::uint32_t seen, std::int64_t timeout_ns) noexcept;
  void wake_all() noexcept;

  // The client asks for memory from here on (arbiter/memory_board.hpp) / no longer does. Does nothing where the slot no
  // longer belongs to this Table: another client may own that slot and ask, too. False: no request was made.
  bool ask_for_memory(int slot, std::uint64_t number, std::uint64_t bytes, std::int64_t until_ns,
                      bool moves = false) noexcept;
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
