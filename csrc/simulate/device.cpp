#include "simulate/device.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <type_traits>

namespace cudasched::simulate {
namespace {

constexpr std::uint64_t kMaxBlocks = std::uint64_t{1} << 40;

static_assert(std::is_trivially_copyable_v<Device> && std::is_standard_layout_v<Device>);
static_assert(kContextCount * kOpsPerContext <= 1 << 16, "the lower 16 bits of a ticket are the operation's place");

// Stores before it are in memory before stores after it, for a process that looks once this one has been killed.
void order_stores() noexcept { std::atomic_signal_fence(std::memory_order_seq_cst); }

}  // namespace

void Device::initialize(std::int64_t now_ns) noexcept {
  now_ns_ = now_ns;
  sequence_ = 0;
  order_ = 0;
  active_ = kNone;
  active_since_ns_ = now_ns;
  slice_end_ns_ = kNever;
  switch_until_ns_ = kNever;
  for (Context& context : contexts_) context.used = 0;
  for (Cohort& cohort : cohorts_) cohort.op = kNone;
  for (Stream& stream : streams_) stream.used = 0;
  for (Op& op : ops_) op.state = State::kFree;
  rebuild();
}

Status Device::create_context(int* context) noexcept {
  for (int slot = 0; slot < kContextCount; ++slot) {
    Context& candidate = contexts_[slot];
    if (candidate.used != 0) continue;
    candidate.run_ns = 0;
    candidate.slice_ns = kSliceNs;
    prepare_lists(slot);
    order_stores();
    candidate.used = 1;
    *context = slot;
    return Status::kOk;
  }
  return Status::kFull;
}

void Device::destroy_context(int context) noexcept {
  if (!context_used(context)) return;
  for (Cohort& cohort : cohorts_) {
    if (cohort.op != kNone && context_of(cohort.op) == context) cohort.op = kNone;
  }
  for (int i = 0; i < kOpsPerContext; ++i) ops_[context * kOpsPerContext + i].state = State::kFree;
  for (int i = 0; i < kStreamsPerContext; ++i) streams_[context * kStreamsPerContext + i].used = 0;
  order_stores();
  contexts_[context].used = 0;
  rebuild();
}

bool Device::context_used(int context) const noexcept {
  return context >= 0 && context < kContextCount && contexts_[context].used != 0;
}

void Device::set_slice(int context, std::int64_t slice_ns) noexcept {
  if (context_used(context) && slice_ns > 0) contexts_[context].slice_ns = slice_ns;
}

Status Device::create_stream(int context, int* stream) noexcept {
  if (!context_used(context)) return Status::kInvalid;
  for (int i = 0; i < kStreamsPerContext; ++i) {
    Stream& candidate = streams_[context * kStreamsPerContext + i];
    if (candidate.used != 0) continue;
    candidate = Stream{.used = 1, .closing = 0, .head = kNone, .tail = kNone, .next_pending = kNone, .pending = 0};
    *stream = i;
    return Status::kOk;
  }
  return Status::kFull;
}

Status Device::destroy_stream(int context, int stream) noexcept {
  if (!context_used(context) || stream < 0 || stream >= kStreamsPerContext) return Status::kInvalid;
  Stream& closed = streams_[context * kStreamsPerContext + stream];
  if (closed.used == 0 || closed.closing != 0) return Status::kInvalid;
  closed.closing = 1;
  if (closed.head == kNone) closed.used = 0;
  return Status::kOk;
}

Status Device::submit(int context, int stream, const Work& work, Ticket* ticket) noexcept {
  if (!context_used(context) || stream < 0 || stream >= kStreamsPerContext) return Status::kInvalid;
  const int place = context * kStreamsPerContext + stream;
  Stream& target = streams_[place];
  if (target.used == 0 || target.closing != 0) return Status::kInvalid;
  if (work.kind == OpKind::kKernel &&
      (work.blocks == 0 || work.blocks > kMaxBlocks || work.blocks_per_sm == 0 ||
       work.blocks_per_sm > kMaxBlocksPerSm || work.block_ns <= 0 || work.block_ns > kMaxDurationNs)) {
    return Status::kInvalid;
  }
  Context& owner = contexts_[context];
  const int index = owner.first_free;
  if (index == kNone) return Status::kFull;
  Op& op = ops_[index];
  owner.first_free = op.next;
  ++owner.op_count;
  op.kind = work.kind;
  op.sequence = ++sequence_;
  op.order = 0;
  op.finish_ns = kNever;
  op.block_ns = work.block_ns;
  op.blocks = work.blocks;
  op.blocks_finished = 0;
  op.bytes = work.bytes;
  op.wait_for = work.wait_for;
  op.stream = stream;
  op.priority = work.priority;
  op.sm_units = kSmUnits / std::max(work.blocks_per_sm, 1U);
  op.blocks_resident = 0;
  op.next = op.next_ready = op.first_waiter = op.next_waiter = kNone;
  op.listed = 0;
  order_stores();
  op.state = State::kQueued;
  *ticket = ticket_of(index);
  if (target.tail == kNone) {
    target.head = target.tail = index;
    push_pending(place);
    run_pending();
    schedule();
  } else {
    ops_[target.tail].next = index;
    target.tail = index;
  }
  return Status::kOk;
}

void Device::advance(std::int64_t now_ns) noexcept {
  for (std::int64_t next = next_event_ns(); next <= now_ns; next = next_event_ns()) {
    now_ns_ = std::max(now_ns_, next);
    if (switch_until_ns_ <= now_ns_) {
      switch_until_ns_ = kNever;
      active_since_ns_ = now_ns_;
      load_sms();
    }
    finish_cohorts();
    if (copying_ != kNone && ops_[copying_].finish_ns <= now_ns_) {
      const int copied = copying_;
      copying_ = kNone;
      complete(copied);
      push_pending(context_of(copied) * kStreamsPerContext + ops_[copied].stream);
    }
    run_pending();
    schedule();
  }
  now_ns_ = std::max(now_ns_, now_ns);
}

bool Device::is_complete(Ticket ticket) const noexcept {
  const int index = find(ticket);
  return index == kNone || ops_[index].state != State::kQueued;
}

std::int64_t Device::next_event_ns() const noexcept {
  std::int64_t next = switch_until_ns_;
  if (copying_ != kNone) next = std::min(next, ops_[copying_].finish_ns);
  if (active_ == kNone || switch_until_ns_ != kNever) return next;
  if (slice_end_ns_ != kNever && next_context() != kNone) next = std::min(next, std::max(now_ns_, slice_end_ns_));
  if (contexts_[active_].cohorts == 0) return next;
  std::int64_t first_end = kNever;
  for (std::size_t word = 0; word < used_cohorts_.size(); ++word) {
    for (std::uint64_t bits = used_cohorts_[word]; bits != 0; bits &= bits - 1) {
      const Cohort& cohort = cohorts_[word * 64 + static_cast<std::size_t>(std::countr_zero(bits))];
      if (context_of(cohort.op) == active_) first_end = std::min(first_end, cohort.finish_run_ns);
    }
  }
  return std::min(next, std::max(now_ns_, active_since_ns_ + (first_end - contexts_[active_].run_ns)));
}

bool Device::take_completed(int context, Completion* completion) noexcept {
  if (!context_used(context) || contexts_[context].first_done == kNone) return false;
  Context& owner = contexts_[context];
  const int index = owner.first_done;
  Op& op = ops_[index];
  *completion = {.ticket = ticket_of(index), .order = op.order, .finish_ns = op.finish_ns};
  owner.first_done = op.next;
  if (owner.first_done == kNone) owner.last_done = kNone;
  op.state = State::kFree;
  op.next = owner.first_free;
  owner.first_free = index;
  --owner.op_count;
  return true;
}

int Device::op_count(int context) const noexcept { return context_used(context) ? contexts_[context].op_count : 0; }

void Device::rebuild() noexcept {
  if (active_ < kNone || active_ >= kContextCount) active_ = kNone;
  copying_ = first_copy_ = first_pending_ = last_pending_ = kNone;
  used_cohorts_.fill(0);
  for (int slot = 0; slot < kContextCount; ++slot) {
    if (contexts_[slot].used != 0) {
      prepare_lists(slot);
    } else {
      contexts_[slot].first_ready = kNone;
      contexts_[slot].cohorts = 0;
    }
  }
  for (int i = 0; i < kCohortCount; ++i) {
    Cohort& cohort = cohorts_[i];
    if (cohort.op == kNone) continue;
    Op& op = ops_[cohort.op];
    if (contexts_[context_of(cohort.op)].used == 0 || op.state != State::kQueued) {
      cohort.op = kNone;
      continue;
    }
    used_cohorts_[i / 64] |= std::uint64_t{1} << (i % 64);
    op.blocks_resident += cohort.blocks;
    ++contexts_[context_of(cohort.op)].cohorts;
  }
  load_sms();
  for (int place = 0; place < kContextCount * kStreamsPerContext; ++place) {
    if (contexts_[place / kStreamsPerContext].used != 0 && streams_[place].used != 0) push_pending(place);
  }
  run_pending();
  schedule();
}

// Lists of one context, from its operations and streams.
void Device::prepare_lists(int context) noexcept {
  Context& owner = contexts_[context];
  owner.first_free = owner.first_ready = owner.first_done = owner.last_done = kNone;
  owner.op_count = 0;
  owner.cohorts = 0;
  for (int i = 0; i < kStreamsPerContext; ++i) {
    Stream& stream = streams_[context * kStreamsPerContext + i];
    stream.head = stream.tail = stream.next_pending = kNone;
    stream.pending = 0;
  }
  std::array<std::int32_t, kOpsPerContext> queued;
  std::array<std::int32_t, kOpsPerContext> done;
  int queued_count = 0;
  int done_count = 0;
  for (int index = (context + 1) * kOpsPerContext - 1; index >= context * kOpsPerContext; --index) {
    Op& op = ops_[index];
    op.next_ready = op.first_waiter = op.next_waiter = kNone;
    op.listed = 0;
    op.blocks_resident = 0;
    const Stream& stream = streams_[context * kStreamsPerContext + op.stream];
    if (op.state == State::kQueued && stream.used == 0) {
      op.state = State::kFree;
    }
    if (op.state == State::kFree) {
      op.next = owner.first_free;
      owner.first_free = index;
      continue;
    }
    op.next = kNone;
    ++owner.op_count;
    (op.state == State::kQueued ? queued[queued_count++] : done[done_count++]) = index;
    if (op.state == State::kQueued && op.kind == OpKind::kCopy && op.finish_ns != kNever) copying_ = index;
  }
  std::sort(queued.begin(), queued.begin() + queued_count,
            [this](int a, int b) { return ops_[a].sequence < ops_[b].sequence; });
  std::sort(done.begin(), done.begin() + done_count, [this](int a, int b) { return ops_[a].order < ops_[b].order; });
  for (int i = 0; i < queued_count; ++i) {
    Stream& stream = streams_[context * kStreamsPerContext + ops_[queued[i]].stream];
    (stream.tail == kNone ? stream.head : ops_[stream.tail].next) = queued[i];
    stream.tail = queued[i];
  }
  for (int i = 0; i < done_count; ++i) {
    (owner.last_done == kNone ? owner.first_done : ops_[owner.last_done].next) = done[i];
    owner.last_done = done[i];
  }
}

Ticket Device::ticket_of(int op) const noexcept { return ops_[op].sequence << 16 | static_cast<std::uint64_t>(op); }

int Device::find(Ticket ticket) const noexcept {
  const auto index = static_cast<int>(ticket & 0xffff);
  if (ticket == 0 || index >= kContextCount * kOpsPerContext || !context_used(context_of(index))) return kNone;
  const Op& op = ops_[index];
  return op.state != State::kFree && op.sequence == ticket >> 16 ? index : kNone;
}

bool Device::has_kernels(int context) const noexcept {
  const Context& candidate = contexts_[context];
  return candidate.used != 0 && (candidate.first_ready != kNone || candidate.cohorts != 0);
}

std::int64_t Device::run_ns(int context) const noexcept {
  const bool running = context == active_ && switch_until_ns_ == kNever;
  return contexts_[context].run_ns + (running ? now_ns_ - active_since_ns_ : 0);
}

void Device::push_pending(int stream) noexcept {
  Stream& pushed = streams_[stream];
  if (pushed.pending != 0) return;
  pushed.pending = 1;
  pushed.next_pending = kNone;
  (last_pending_ == kNone ? first_pending_ : streams_[last_pending_].next_pending) = stream;
  last_pending_ = stream;
}

void Device::run_pending() noexcept {
  while (first_pending_ != kNone) {
    const int stream = first_pending_;
    first_pending_ = streams_[stream].next_pending;
    if (first_pending_ == kNone) last_pending_ = kNone;
    streams_[stream].pending = 0;
    run_stream(stream);
  }
  start_copy();
}

// Completes operations at the head of the stream, and queues the first one that cannot complete where it waits.
void Device::run_stream(int place) noexcept {
  Stream& stream = streams_[place];
  while (stream.head != kNone) {
    const int index = stream.head;
    Op& op = ops_[index];
    if (op.listed != 0) return;
    switch (op.kind) {
      case OpKind::kMarker:
        break;
      case OpKind::kKernel:
        if (op.blocks_finished >= op.blocks) break;
        if (op.blocks_finished + op.blocks_resident < op.blocks) {
          insert_ready(&contexts_[context_of(index)].first_ready, index);
        }
        return;
      case OpKind::kCopy:
        if (index != copying_) insert_ready(&first_copy_, index);
        return;
      case OpKind::kWait: {
        const int awaited = find(op.wait_for);
        if (awaited == kNone || ops_[awaited].state != State::kQueued) break;
        std::int32_t* link = &ops_[awaited].first_waiter;
        while (*link != kNone && ops_[*link].sequence < op.sequence) link = &ops_[*link].next_waiter;
        op.next_waiter = *link;
        *link = index;
        op.listed = 1;
        return;
      }
    }
    complete(index);
  }
  if (stream.closing != 0) stream.used = 0;
}

// The operation must be at the head of its stream.
void Device::complete(int index) noexcept {
  Op& op = ops_[index];
  Stream& stream = streams_[context_of(index) * kStreamsPerContext + op.stream];
  op.finish_ns = now_ns_;
  op.order = ++order_;
  order_stores();
  op.state = State::kDone;
  stream.head = op.next;
  if (stream.head == kNone) stream.tail = kNone;
  op.next = kNone;
  Context& owner = contexts_[context_of(index)];
  (owner.last_done == kNone ? owner.first_done : ops_[owner.last_done].next) = index;
  owner.last_done = index;
  for (int waiter = op.first_waiter; waiter != kNone;) {
    Op& waiting = ops_[waiter];
    const int next = waiting.next_waiter;
    waiting.listed = 0;
    waiting.next_waiter = kNone;
    push_pending(context_of(waiter) * kStreamsPerContext + waiting.stream);
    waiter = next;
  }
  op.first_waiter = kNone;
}

void Device::insert_ready(std::int32_t* list, int index) noexcept {
  Op& op = ops_[index];
  const bool by_priority = op.kind == OpKind::kKernel;
  std::int32_t* link = list;
  while (*link != kNone) {
    const Op& other = ops_[*link];
    const bool same = !by_priority || other.priority == op.priority;
    if (same ? op.sequence < other.sequence : op.priority < other.priority) break;
    link = &ops_[*link].next_ready;
  }
  op.next_ready = *link;
  *link = index;
  op.listed = 1;
}

void Device::start_copy() noexcept {
  if (copying_ != kNone || first_copy_ == kNone) return;
  copying_ = first_copy_;
  Op& op = ops_[copying_];
  first_copy_ = op.next_ready;
  op.next_ready = kNone;
  op.listed = 0;
  op.finish_ns = now_ns_ + kCopyLatencyNs + static_cast<std::int64_t>(op.bytes / kCopyBytesPerNs);
}

void Device::schedule() noexcept {
  choose_context();
  if (active_ != kNone && switch_until_ns_ == kNever) dispatch();
}

// The next one, by slot, that has kernels for the GPU.
int Device::next_context() const noexcept {
  for (int step = 1; step <= kContextCount; ++step) {
    const int candidate = (std::max(active_, 0) + step) % kContextCount;
    if (candidate != active_ && has_kernels(candidate)) return candidate;
  }
  return kNone;
}

void Device::choose_context() noexcept {
  if (switch_until_ns_ != kNever) return;
  const bool busy = active_ != kNone && has_kernels(active_);
  if (busy) {
    const std::int64_t slice_ns = contexts_[active_].slice_ns;
    if (slice_end_ns_ == kNever) slice_end_ns_ = now_ns_ + slice_ns;
    // Slices of a context that was alone have renewed meanwhile.
    if (now_ns_ > slice_end_ns_) slice_end_ns_ += (now_ns_ - slice_end_ns_ + slice_ns - 1) / slice_ns * slice_ns;
    if (now_ns_ < slice_end_ns_) return;
  }
  const int next = next_context();
  if (next == kNone) {
    slice_end_ns_ = busy ? now_ns_ + contexts_[active_].slice_ns : kNever;
    return;
  }
  slice_end_ns_ = kNever;
  if (active_ == kNone) {
    active_ = next;
    active_since_ns_ = now_ns_;
    slice_end_ns_ = now_ns_ + contexts_[active_].slice_ns;
    load_sms();
    return;
  }
  contexts_[active_].run_ns = run_ns(active_);
  active_ = next;
  switch_until_ns_ = now_ns_ + kSwitchNs;
}

void Device::dispatch() noexcept {
  Context& context = contexts_[active_];
  while (context.first_ready != kNone) {
    Op& op = ops_[context.first_ready];
    while (op.blocks_finished + op.blocks_resident < op.blocks) {
      if (!dispatch_op(context.first_ready)) return;
    }
    context.first_ready = op.next_ready;
    op.next_ready = kNone;
    op.listed = 0;
  }
}

// One cohort of as many of its blocks as there is room for. False: nothing fits, or no cohort is free.
bool Device::dispatch_op(int index) noexcept {
  Op& op = ops_[index];
  std::array<std::uint8_t, kSmCount> room;
  std::array<std::uint32_t, kMaxBlocksPerSm + 1> sms_with_room{};
  std::uint64_t total = 0;
  for (int sm = 0; sm < kSmCount; ++sm) {
    room[sm] = static_cast<std::uint8_t>(sm_free_[sm] / op.sm_units);
    ++sms_with_room[room[sm]];
    total += room[sm];
  }
  if (total == 0) return false;
  const int slot = allocate_cohort();
  if (slot == kNone) return false;
  const std::uint64_t blocks = std::min(op.blocks - op.blocks_finished - op.blocks_resident, total);

  // Blocks go where the most room is: down to `level` blocks of room left everywhere, then one more on the first
  // `remainder` SMs that have that much.
  std::uint64_t given = 0;
  std::uint64_t above = 0;
  int level = kMaxBlocksPerSm;
  while (level > 0 && given + above + sms_with_room[level] <= blocks) {
    above += sms_with_room[level];
    given += above;
    --level;
  }
  std::uint64_t remainder = blocks - given;
  Cohort& cohort = cohorts_[slot];
  for (int sm = 0; sm < kSmCount; ++sm) {
    int count = std::max(room[sm] - level, 0);
    if (remainder > 0 && room[sm] >= level && level > 0) {
      ++count;
      --remainder;
    }
    cohort.on_sm[sm] = static_cast<std::uint8_t>(count);
    sm_free_[sm] -= static_cast<std::uint32_t>(count) * op.sm_units;
  }
  cohort.blocks = static_cast<std::uint32_t>(blocks);
  cohort.finish_run_ns = run_ns(active_) + op.block_ns;
  order_stores();
  cohort.op = index;
  used_cohorts_[slot / 64] |= std::uint64_t{1} << (slot % 64);
  op.blocks_resident += blocks;
  ++contexts_[active_].cohorts;
  return true;
}

void Device::finish_cohorts() noexcept {
  if (active_ == kNone || switch_until_ns_ != kNever) return;
  const std::int64_t now = run_ns(active_);
  for (std::size_t word = 0; word < used_cohorts_.size(); ++word) {
    for (std::uint64_t bits = used_cohorts_[word]; bits != 0; bits &= bits - 1) {
      const auto slot = static_cast<int>(word * 64) + std::countr_zero(bits);
      const int index = cohorts_[slot].op;
      if (context_of(index) != active_ || cohorts_[slot].finish_run_ns > now) continue;
      release_cohort(slot);
      Op& op = ops_[index];
      if (op.blocks_finished < op.blocks) continue;
      complete(index);
      push_pending(context_of(index) * kStreamsPerContext + op.stream);
    }
  }
}

void Device::load_sms() noexcept {
  sm_free_.fill(kSmUnits);
  if (active_ == kNone) return;
  for (std::size_t word = 0; word < used_cohorts_.size(); ++word) {
    for (std::uint64_t bits = used_cohorts_[word]; bits != 0; bits &= bits - 1) {
      const Cohort& cohort = cohorts_[word * 64 + static_cast<std::size_t>(std::countr_zero(bits))];
      if (context_of(cohort.op) != active_) continue;
      for (int sm = 0; sm < kSmCount; ++sm) sm_free_[sm] -= cohort.on_sm[sm] * ops_[cohort.op].sm_units;
    }
  }
}

int Device::allocate_cohort() const noexcept {
  for (std::size_t word = 0; word < used_cohorts_.size(); ++word) {
    if (~used_cohorts_[word] != 0) return static_cast<int>(word * 64) + std::countr_one(used_cohorts_[word]);
  }
  return kNone;
}

void Device::release_cohort(int slot) noexcept {
  Cohort& cohort = cohorts_[slot];
  const int index = cohort.op;
  Op& op = ops_[index];
  // In this order: a cut between the two makes the blocks run again, the other order could end the kernel early.
  cohort.op = kNone;
  order_stores();
  op.blocks_finished += cohort.blocks;
  op.blocks_resident -= cohort.blocks;
  used_cohorts_[slot / 64] &= ~(std::uint64_t{1} << (slot % 64));
  --contexts_[context_of(index)].cohorts;
  for (int sm = 0; sm < kSmCount; ++sm) sm_free_[sm] += cohort.on_sm[sm] * op.sm_units;
}

std::uint64_t Device::resident_blocks(Ticket ticket) const noexcept {
  const int index = find(ticket);
  return index == kNone ? 0 : ops_[index].blocks_resident;
}

bool Device::consistent() const noexcept {
  std::array<std::uint64_t, kContextCount> cohorts{};
  std::array<std::uint64_t, kSmCount> taken{};
  for (int i = 0; i < kCohortCount; ++i) {
    const bool used = (used_cohorts_[i / 64] >> (i % 64) & 1) != 0;
    const Cohort& cohort = cohorts_[i];
    if (used != (cohort.op != kNone)) return false;
    if (!used) continue;
    const Op& op = ops_[cohort.op];
    std::uint64_t blocks = 0;
    for (int sm = 0; sm < kSmCount; ++sm) {
      blocks += cohort.on_sm[sm];
      if (context_of(cohort.op) == active_) taken[sm] += cohort.on_sm[sm] * op.sm_units;
    }
    if (op.state != State::kQueued || op.kind != OpKind::kKernel || blocks != cohort.blocks || blocks == 0)
      return false;
    ++cohorts[context_of(cohort.op)];
  }
  for (int sm = 0; sm < kSmCount && switch_until_ns_ == kNever; ++sm) {
    if (taken[sm] > kSmUnits || taken[sm] + sm_free_[sm] != kSmUnits) return false;
  }
  for (int context = 0; context < kContextCount; ++context) {
    if (contexts_[context].used == 0) {
      if (cohorts[context] != 0) return false;
      continue;
    }
    if (cohorts[context] != contexts_[context].cohorts) return false;
    int count = 0;
    for (int index = contexts_[context].first_free; index != kNone; index = ops_[index].next) ++count;
    if (count + contexts_[context].op_count != kOpsPerContext) return false;
    for (int i = 0; i < kOpsPerContext; ++i) {
      const Op& op = ops_[context * kOpsPerContext + i];
      if (op.state == State::kQueued && op.blocks_finished + op.blocks_resident > op.blocks) return false;
    }
  }
  return true;
}

}  // namespace cudasched::simulate
