// A simulated GPU: a discrete-event model of streams, thread blocks on SMs, a copy engine, and contexts that take
// turns. The model executes nothing; it says when each operation would be complete. Times are simulated nanoseconds
// that the caller passes in, so the same class runs on a real or on a virtual clock. A Device never reads a clock,
// allocates, throws, or holds a pointer: it is plain data that may be in shared memory. A Device has no lock; the
// caller holds one around each call.
//
// The rules of the model
//   Streams    operations of a stream run one after another, in the order of submission.
//   Blocks     a kernel has `blocks` equal blocks of `block_ns`; one SM holds `blocks_per_sm` of them, and as many SMs
//              as have room are filled evenly, the emptiest first. Kernels at the head of several streams share the
//              SMs. Order of dispatch: priority (lower value first), then submission. A kernel gets slots only when all
//              blocks of every kernel before it have been dispatched. A priority never pushes resident blocks out.
//   Contexts   the blocks of one context run at a time. A context whose slice (2.048 ms unless it is set) is over while
//              another has kernels ready is stopped at once: its resident blocks freeze and later go on where they
//              stopped. Switching to another context costs 0.13 ms in which no block runs. A context without kernels
//              yields at once; the slice of a context that is alone renews. Turns go round by slot number.
//   Copies     one copy engine, shared by all contexts and not time-sliced: oldest ready copy first, one at a time,
//              kCopyLatencyNs + bytes / kCopyBytesPerNs.
//   Markers    complete when they are reached. An event record is a marker, an event its ticket.
//   Waits      complete when the operation they name is complete, or gone with its context.
// The result depends on the operations and the times of their submission alone, not on how often advance is called.
//
// Limits (an error code, never an overflow): kContextCount contexts, kStreamsPerContext streams and kOpsPerContext
// operations a context (a complete operation counts until take_completed has returned it), kCohortCount groups of
// blocks dispatched together (when they are used up, further blocks wait for one to end), kMaxBlocksPerSm,
// kMaxDurationNs.
//
// Crash-safety: a process may be killed inside any call. Operations, cohorts, streams and contexts have all essential
// state, written in an order that a cut leaves usable; the rest is lists that rebuild() makes anew from that state. A
// cut may cost the times of a few blocks (they run twice); no operation of another context is lost or completes twice.
#pragma once

#include <array>
#include <cstdint>

namespace cudasched::simulate {

inline constexpr int kSmCount = 132;
inline constexpr int kMaxBlocksPerSm = 32;
inline constexpr int kContextCount = 64;
inline constexpr int kStreamsPerContext = 256;
inline constexpr int kOpsPerContext = 1024;
inline constexpr int kCohortCount = 1024;
inline constexpr std::int64_t kSliceNs = 2'048'000;
inline constexpr std::int64_t kSwitchNs = 130'000;
inline constexpr std::int64_t kCopyLatencyNs = 1'000;
inline constexpr std::int64_t kCopyBytesPerNs = 50;
inline constexpr std::int64_t kMaxDurationNs = 1'000'000'000'000;  // of one block
inline constexpr std::int64_t kNever = INT64_MAX;

// Names one operation for ever; 0 names none. The lower 16 bits are the place of the operation in its table
// (op_index), which is its own until take_completed has returned it.
using Ticket = std::uint64_t;

enum class Status { kOk, kInvalid, kFull };

enum class OpKind : std::uint32_t { kMarker, kKernel, kCopy, kWait };

// An operation to submit. Fields that the kind does not name are not read.
struct Work {
  OpKind kind = OpKind::kMarker;
  std::int32_t priority = 0;        // kKernel: lower is dispatched first
  std::uint64_t blocks = 1;         // kKernel: at least 1
  std::uint32_t blocks_per_sm = 1;  // kKernel: 1 to kMaxBlocksPerSm
  std::int64_t block_ns = 0;        // kKernel: 1 to kMaxDurationNs
  std::uint64_t bytes = 0;          // kCopy
  Ticket wait_for = 0;              // kWait
};

struct Completion {
  Ticket ticket = 0;
  std::uint64_t order = 0;  // ascending in the order in which operations of all contexts complete
  std::int64_t finish_ns = 0;
};

class Device {
 public:
  // Makes an empty device. Must be called once before anything else; not a constructor because shared memory has none.
  void initialize(std::int64_t now_ns) noexcept;

  // kFull: no slot is free. `context` is the slot, 0 to kContextCount - 1.
  Status create_context(int* context) noexcept;
  // The context's operations, streams and resident blocks vanish at once; waits for these operations are over. Nothing
  // happens if the slot is free.
  void destroy_context(int context) noexcept;
  bool context_used(int context) const noexcept;
  // From the context's next slice on; over 0.
  void set_slice(int context, std::int64_t slice_ns) noexcept;

  Status create_stream(int context, int* stream) noexcept;
  // Operations already in the stream still run; its place is free again when the last is complete.
  Status destroy_stream(int context, int stream) noexcept;

  // Appends to a stream at the device's time (call advance first). kFull: take_completed, or wait.
  Status submit(int context, int stream, const Work& work, Ticket* ticket) noexcept;

  // Runs the model up to `now_ns`; an earlier time than the device's does nothing.
  void advance(std::int64_t now_ns) noexcept;

  // Complete, or gone with its context.
  bool is_complete(Ticket ticket) const noexcept;

  // When the model's state changes next if nothing is submitted; kNever if it is idle.
  std::int64_t next_event_ns() const noexcept;

  // The context's next complete operation, in order of completion; frees its place. False: there is none.
  bool take_completed(int context, Completion* completion) noexcept;

  // Operations of the context that take_completed has not returned.
  int op_count(int context) const noexcept;

  // After a process was killed inside a call, and before any other call: makes every list anew.
  void rebuild() noexcept;

  std::int64_t now_ns() const noexcept { return now_ns_; }

  // For tests: the resident blocks now, and whether the class's invariants hold.
  std::uint64_t resident_blocks(Ticket ticket) const noexcept;
  bool consistent() const noexcept;

  static constexpr int op_index(Ticket ticket) noexcept { return static_cast<int>(ticket & 0xffff) % kOpsPerContext; }

 private:
  static constexpr int kNone = -1;
  static constexpr std::uint32_t kSmUnits = 1 << 16;  // a block of a kernel takes kSmUnits / blocks_per_sm of an SM

  enum class State : std::uint32_t { kFree, kQueued, kDone };

  struct Op {
    State state;
    OpKind kind;
    std::uint64_t sequence;  // of submission, unique
    std::uint64_t order;     // of completion
    std::int64_t finish_ns;  // kDone: when; a copy that the engine has begun: when it will be; else kNever
    std::int64_t block_ns;
    std::uint64_t blocks;
    std::uint64_t blocks_finished;
    std::uint64_t bytes;
    Ticket wait_for;
    std::int32_t stream;
    std::int32_t priority;
    std::uint32_t sm_units;
    // Made anew by rebuild:
    std::uint64_t blocks_resident;
    std::int32_t next;          // in its stream, in the list of complete operations, or in the free list
    std::int32_t next_ready;    // in the context's ready kernels, or in the ready copies
    std::int32_t first_waiter;  // waits at the head of their streams
    std::int32_t next_waiter;
    std::uint32_t listed;  // 1: in a ready list or a list of waiters
  };

  struct Stream {
    std::uint32_t used;
    std::uint32_t closing;
    // Made anew by rebuild:
    std::int32_t head, tail;
    std::int32_t next_pending;
    std::uint32_t pending;
  };

  struct Context {
    std::uint32_t used;
    std::int64_t run_ns;  // time that its blocks have run, up to active_since_ns_
    std::int64_t slice_ns;
    // Made anew by rebuild:
    std::int32_t first_free, first_ready, first_done, last_done;
    std::int32_t op_count;
    std::uint64_t cohorts;
  };

  // Blocks of one kernel that were dispatched together and end together.
  struct Cohort {
    std::int32_t op;  // kNone: free
    std::uint32_t blocks;
    std::int64_t finish_run_ns;  // on the clock of its context, which stands still while another runs
    std::array<std::uint8_t, kSmCount> on_sm;
  };

  static int context_of(int op) noexcept { return op / kOpsPerContext; }
  Ticket ticket_of(int op) const noexcept;
  int find(Ticket ticket) const noexcept;
  bool has_kernels(int context) const noexcept;
  int next_context() const noexcept;
  std::int64_t run_ns(int context) const noexcept;

  void push_pending(int stream) noexcept;
  void run_pending() noexcept;
  void run_stream(int stream) noexcept;
  void complete(int op) noexcept;
  void insert_ready(std::int32_t* list, int op) noexcept;
  void start_copy() noexcept;
  void schedule() noexcept;
  void choose_context() noexcept;
  void dispatch() noexcept;
  bool dispatch_op(int op) noexcept;
  void finish_cohorts() noexcept;
  void load_sms() noexcept;
  int allocate_cohort() const noexcept;
  void release_cohort(int cohort) noexcept;
  void prepare_lists(int context) noexcept;

  std::int64_t now_ns_;
  std::uint64_t sequence_;
  std::uint64_t order_;
  std::int32_t active_;  // whose blocks run, or which is being switched to
  std::int64_t active_since_ns_;
  std::int64_t slice_end_ns_;
  std::int64_t switch_until_ns_;  // kNever: not switching
  std::int32_t copying_;
  std::int32_t first_copy_;
  std::int32_t first_pending_, last_pending_;  // streams (context * kStreamsPerContext + stream) to look at
  std::array<std::uint64_t, kCohortCount / 64> used_cohorts_;
  std::array<std::uint32_t, kSmCount> sm_free_;  // units, of the active context
  std::array<Context, kContextCount> contexts_;
  std::array<Stream, static_cast<std::size_t>(kContextCount) * kStreamsPerContext> streams_;
  std::array<Cohort, kCohortCount> cohorts_;
  std::array<Op, static_cast<std::size_t>(kContextCount) * kOpsPerContext> ops_;
};

}  // namespace cudasched::simulate
