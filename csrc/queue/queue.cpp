#include "queue/queue.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.hpp"
#include "base/hash.hpp"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "driver/registry.hpp"

namespace cudasched::queue {
namespace {

template <typename Handle>
std::uint64_t word(Handle handle) noexcept {
  return reinterpret_cast<std::uint64_t>(handle);
}

// Limits that depend on the grid, which a launch's like says nothing of.
bool within_limits(const unsigned (&grid)[3], const unsigned (&cluster)[3]) noexcept {
  constexpr unsigned kLargest[3] = {0x7fff'ffff, 0xffff, 0xffff};
  for (int i = 0; i < 3; ++i) {
    if (grid[i] == 0 || grid[i] > kLargest[i] || cluster[i] == 0 || grid[i] % cluster[i] != 0) return false;
  }
  return true;
}

// A hash of the traits of a launch that decide its success. `device`: where a kernel is loaded lazily, each device
// loads its own.
std::uint64_t like_of(const Call& call, std::uint64_t serial, int device) noexcept {
  std::uint64_t hash = mix(mix(mix(1, serial), static_cast<std::uint64_t>(device)), call.meaning.hash);
  for (const unsigned size : call.block) hash = mix(hash, size);
  hash = mix(mix(hash, call.dynamic_shared_bytes), call.cooperative ? 2 : 1);
  // How large a cooperative grid may be depends on everything else.
  const bool whole_grid = call.cooperative || call.meaning.cooperative;
  for (const unsigned size : call.grid) hash = mix(hash, whole_grid ? size : 0);
  return hash == 0 ? 1 : hash;
}

// A parameter block for `extra`, beside the list that names it.
struct Packed {
  void* list[5];
  std::size_t bytes;
};

// An event that is not known may be another process's.
bool may_defer_record(CUevent event) noexcept {
  driver::EventFacts facts;
  return driver::registry().find(event, facts) && !facts.shared;
}

bool may_defer_wait(CUevent event) noexcept {
  driver::EventFacts facts;
  return driver::registry().find(event, facts) && !facts.shared && !facts.captured;
}

bool may_defer(CUgraphExec graph) noexcept {
  driver::ExecFacts facts;
  return driver::registry().find(graph, facts) && facts.plain && facts.launched;
}

constexpr std::size_t aligned(std::size_t bytes) noexcept { return (bytes + 15) & ~std::size_t{15}; }

}  // namespace

Queue::Queue(Admission& admission, GilCheck holds_gil, std::uint32_t slots, std::uint32_t arena_bytes) noexcept
    : holds_gil_(holds_gil), ring_(slots, arena_bytes), launcher_(ring_, lock_, mailbox_, admission) {}

// ---- life

bool Queue::start(Launcher::Idle idle) noexcept {
  if (!ring_.usable() || !launcher_.start(idle)) return false;
  accepting_.store(true, std::memory_order_release);
  return true;
}

void Queue::fail() noexcept {
  accepting_.store(false, std::memory_order_release);
  launcher_.open_until(~Position{0});
}

void Queue::stop(std::int64_t longest_ns) noexcept {
  {
    const SpinGuard guard(lock_);  // a push under way on another thread ends first
    accepting_.store(false, std::memory_order_release);
  }
  launcher_.stop(longest_ns);
}

void Queue::abandon() noexcept {
  accepting_.store(false, std::memory_order_release);
  ring_.abandon();
  launcher_.abandon();
  lock_.unlock();  // a thread of the parent may have held the lock
}

void Queue::latency_came() noexcept {
  // With the claim and the look in open_for(): one of the two opens the gate.
  process_has_latency_.store(true, std::memory_order_seq_cst);
  launcher_.open_until(claimed_.load(std::memory_order_seq_cst));
}

// ---- deferred

Queue::StreamOwner Queue::kind_of(CUstream stream, StreamKind& kind) const noexcept {
  if (stream == CU_STREAM_LEGACY || stream == nullptr) {
    kind = StreamKind::kLegacy;
    return StreamOwner::kOurs;
  }
  if (stream == CU_STREAM_PER_THREAD) {
    kind = StreamKind::kPerThread;
    return StreamOwner::kOurs;
  }
  driver::StreamFacts facts;
  if (!driver::registry().look_up(stream, facts)) return StreamOwner::kUnknown;
  if (facts.device >= 0 && device_ >= 0 && facts.device != device_) return StreamOwner::kOthers;
  kind = facts.blocking ? StreamKind::kBlocking : StreamKind::kNonBlocking;
  return StreamOwner::kOurs;
}

// All under the lock: may(bytes) decides and sets the operation's bytes, fill(operation, data, position) writes the
// operation and keeps the books.
template <typename May, typename Fill>
bool Queue::push_locked(const Caller& caller, CUcontext context, Waiter::For wait, May&& may, Fill&& fill) noexcept {
  while (true) {
    Position room = 0;
    {
      const SpinGuard guard(lock_);
      std::size_t bytes = 0;
      if (!guard.owns() || !active() || !may(bytes) || bytes > ring_.max_bytes()) return false;
      std::byte* data = nullptr;
      if (Operation* operation = ring_.reserve(bytes, data, wait == Waiter::For::kLaunch)) {
        operation->made = false;
        operation->thread = caller.thread;
        operation->region = caller.region;
        operation->context = context;
        order_.passed(ring_.passed());
        const Position position = ring_.pushed() + 1;
        if (Launcher::is_timed(position)) operation->pushed_ns = now_ns();
        fill(*operation, data, position);
        ring_.publish();
        return true;
      }
      // A caller that may not wait behind the gate opens it no further than necessary.
      room = opens_the_gate(caller, wait) ? std::min(ring_.passed() + 1, ring_.pushed()) : ring_.position_with_room();
    }
    drain(caller, room, wait);
  }
}

// An operation on a stream.
template <typename May, typename Fill>
bool Queue::push(const Caller& caller, CUstream stream, Waiter::For wait, May&& may, Fill&& fill) noexcept {
  StreamKind kind = StreamKind::kLegacy;
  if (!active() || stream == CU_STREAM_PER_THREAD || kind_of(stream, kind) != StreamOwner::kOurs) return false;
  return push_locked(caller, caller.context, wait, may, [&](Operation& operation, std::byte* data, Position position) {
    operation.stream = stream;
    fill(operation, data, position);
    order_.stream_used(word(stream), kind, position);
  });
}

bool Queue::push_kernel(const Call& call) noexcept {
  if (!active() || !call.meaning.known || !within_limits(call.grid, call.cluster)) return false;
  std::span<const std::byte> packed;
  if (call.extra != nullptr) {
    if (call.parameters != nullptr || call.cooperative || !driver::read_packed(call.extra, packed)) return false;
  }

  driver::Functions::Known known;
  if (!driver::functions().find(call.function, known) || !known.facts->described) return false;
  if (!driver::functions().has_succeeded(like_of(call, known.serial, device_))) return false;
  const std::vector<driver::Parameter>& parameters = known.facts->parameters;
  const bool is_packed = packed.data() != nullptr;
  if (is_packed ? packed.size() > aligned(known.facts->block_bytes) : !parameters.empty() && call.parameters == nullptr)
    return false;
  // One behind the other: attributes; the list of `extra`, or of pointers; the parameters.
  const std::size_t attribute_bytes = aligned(call.attribute_count * sizeof(CUlaunchAttribute));
  const std::size_t list_bytes = aligned(is_packed ? sizeof(Packed) : parameters.size() * sizeof(void*));
  const std::span events(call.meaning.events.data(), call.meaning.event_count);
  const auto may = [&](std::size_t& bytes) {
    bytes = attribute_bytes + list_bytes + (is_packed ? packed.size() : known.facts->block_bytes);
    return std::all_of(events.begin(), events.end(), may_defer_record);
  };
  return push(call.site.caller, call.stream, Waiter::For::kLaunch, may,
              [&](Operation& operation, std::byte* data, Position position) {
                operation.kind = Operation::Kind::kKernel;
                Operation::Launch& launch = *std::construct_at(&operation.launch);
                launch.what = call;
                launch.cooperative = call.cooperative;
                launch.overlaps_predecessor = call.meaning.overlaps_predecessor;
                if (call.attribute_count != 0) {
                  launch.attributes = reinterpret_cast<CUlaunchAttribute*>(data);
                  launch.attribute_count = call.attribute_count;
                  std::memcpy(data, call.attributes, call.attribute_count * sizeof(CUlaunchAttribute));
                }
                std::byte* const list = data + attribute_bytes;
                std::byte* const block = list + list_bytes;
                launch.what.parameters = nullptr;
                if (is_packed) {
                  auto* const copy = reinterpret_cast<Packed*>(list);
                  *copy = {{CU_LAUNCH_PARAM_BUFFER_POINTER, block, CU_LAUNCH_PARAM_BUFFER_SIZE, &copy->bytes,
                            CU_LAUNCH_PARAM_END},
                           packed.size()};
                  launch.what.extra = copy->list;
                  std::memcpy(block, packed.data(), packed.size());
                } else if (!parameters.empty()) {
                  auto** const pointers = reinterpret_cast<void**>(list);
                  launch.what.parameters = pointers;
                  for (std::size_t i = 0; i < parameters.size(); ++i) {
                    const driver::Parameter parameter = parameters[i];
                    pointers[i] = block + parameter.offset;
                    std::memcpy(pointers[i], call.parameters[i], parameter.bytes);
                  }
                }
                for (CUevent const event : events) {
                  order_.event_recorded(word(event), position);
                  driver::registry().recorded(event, false);
                }
              });
}

bool Queue::push_graph(const Call& call) noexcept {
  return push(
      call.site.caller, call.stream, Waiter::For::kLaunch, [&](std::size_t&) { return may_defer(call.graph()); },
      [&](Operation& operation, std::byte*, Position position) {
        operation.kind = Operation::Kind::kGraph;
        std::construct_at(&operation.launch)->what = call;
        order_.graph_launched(word(call.graph()), position);
      });
}

bool Queue::push_call(const Caller& caller, const Operation& call) noexcept {
  const bool records = call.kind == Operation::Kind::kRecord;
  const bool waits = call.kind == Operation::Kind::kWait;
  if ((records || waits) && (call.event.flags != 0 || call.event.event == nullptr)) return false;
  if (call.kind == Operation::Kind::kHostFunction && call.host.function == nullptr) return false;
  const auto may = [&](std::size_t&) {
    return records ? may_defer_record(call.event.event) : !waits || may_defer_wait(call.event.event);
  };
  return push(caller, call.stream, Waiter::For::kOther, may, [&](Operation& operation, std::byte*, Position position) {
    operation.kind = call.kind;
    constexpr std::size_t kBytes = sizeof(Operation::Fill);
    static_assert(kBytes >= sizeof(Operation::Copy) && kBytes >= sizeof(Operation::Event) &&
                  kBytes >= sizeof(Operation::Host) && kBytes >= sizeof(Operation::Memory));
    std::memcpy(&operation.fill, &call.fill, kBytes);
    if (waits) order_.event_awaited(word(call.event.event), position);
    if (!records) return;
    order_.event_recorded(word(call.event.event), position);
    driver::registry().recorded(call.event.event, false);
  });
}

bool Queue::push_destroy(const Caller& caller, CUevent event, CUcontext context) noexcept {
  return push_locked(
      caller, context, Waiter::For::kOther, [](std::size_t&) { return true; },
      [&](Operation& operation, std::byte*, Position position) {
        operation.kind = Operation::Kind::kDestroyEvent;
        operation.stream = nullptr;
        operation.event = {event, 0};
        order_.event_destroyed(word(event), position);
      });
}

bool Queue::push_change(const Caller& caller, CUgraphExec exec, CUcontext context,
                        std::span<const std::byte> bytes) noexcept {
  const auto may = [&](std::size_t& carried) {
    carried = bytes.size();
    return true;
  };
  return push_locked(caller, context, Waiter::For::kOther, may,
                     [&](Operation& operation, std::byte* data, Position position) {
                       operation.kind = Operation::Kind::kChange;
                       operation.stream = nullptr;
                       operation.change = {exec, data};
                       std::memcpy(data, bytes.data(), bytes.size());
                       order_.graph_launched(word(exec), position);
                     });
}

// ---- drained

Position Queue::before(Scope scope, CUstream stream, CUevent event, CUevent other, CUgraphExec exec) noexcept {
  if (scope == Scope::kNothing || ring_.empty()) return 0;
  if (scope == Scope::kEnd) return ring_.pushed();
  StreamKind kind = StreamKind::kLegacy;
  bool has_stream = scope == Scope::kStream || scope == Scope::kStreamAndEvent;
  if (has_stream) {
    // A stream that the driver does not know: the driver will refuse it.
    const StreamOwner owner = kind_of(stream, kind);
    if (owner == StreamOwner::kUnknown) return ring_.pushed();
    if (owner == StreamOwner::kOthers) {
      if (scope == Scope::kStream) return 0;
      scope = Scope::kEvent;
      has_stream = false;
    }
  }
  const SpinGuard guard(lock_);
  if (!guard.owns()) return ring_.pushed();
  Position position = 0;
  if (has_stream) position = order_.of_stream(word(stream), kind);
  if (scope != Scope::kStream && event != nullptr) position = std::max(position, order_.of_event(word(event)));
  if (scope == Scope::kGraph) position = order_.of_graph(word(exec));
  if (scope == Scope::kTwoEvents && other != nullptr) position = std::max(position, order_.of_event(word(other)));
  return position > ring_.passed() ? position : 0;
}

Waiter Queue::waiter(const Caller& caller, Waiter::For what) const noexcept {
  const bool asks = !caller.latency && what != Waiter::For::kOther;
  return {what, caller.latency, asks && holds_gil_()};
}

bool Queue::opens_the_gate(const Caller& caller, Waiter::For what) const noexcept {
  return !may_wait_behind_the_gate(waiter(caller, what), process_has_latency_.load(std::memory_order_seq_cst));
}

void Queue::open_for(const Caller& caller, Position position, Waiter::For what) noexcept {
  if (opens_the_gate(caller, what)) {
    launcher_.open_until(position);
    return;
  }
  if (may_wait_behind_the_gate(waiter(caller, what), true)) return;
  // Should latency work come to this process meanwhile, this thread must not go on waiting behind a closed gate.
  Position claimed = claimed_.load(std::memory_order_relaxed);
  while (claimed < position && !claimed_.compare_exchange_weak(claimed, position, std::memory_order_seq_cst)) {
  }
  if (process_has_latency_.load(std::memory_order_seq_cst)) launcher_.open_until(position);
}

void Queue::drain(const Caller& caller, Position position, Waiter::For what) noexcept {
  if (position <= ring_.passed()) return;
  drains_[static_cast<std::size_t>(what)].fetch_add(1, std::memory_order_relaxed);
  open_for(caller, position, what);
  launcher_.drain(position);
}

bool Queue::answer_not_ready(const Caller& caller, Position position) noexcept {
  if (position <= ring_.passed()) return false;
  // A thread that asks usually continues with other work, as an allocator that looks for free memory does. One that
  // does nothing but ask waits.
  const bool again = asked_.exchange(position, std::memory_order_relaxed) == position;
  const unsigned times = again ? asked_times_.fetch_add(1, std::memory_order_relaxed) + 1 : 0;
  if (!again) asked_times_.store(0, std::memory_order_relaxed);
  if (caller.latency || times >= kAsksThatWait) open_for(caller, position, Waiter::For::kSynchronise);
  launcher_.check();
  return position > ring_.passed() && !launcher_.off();
}

bool Queue::stream_not_ready(const Caller& caller, CUstream stream) noexcept {
  if (ring_.empty()) return false;
  StreamKind kind = StreamKind::kLegacy;
  if (kind_of(stream, kind) != StreamOwner::kOurs) return false;
  Position position = 0;
  {
    const SpinGuard guard(lock_);
    position = guard.owns() ? order_.of_stream(word(stream), kind) : ring_.pushed();
  }
  return answer_not_ready(caller, position);
}

bool Queue::event_not_ready(const Caller& caller, CUevent event) noexcept {
  if (ring_.empty()) return false;
  Position position = 0;
  {
    const SpinGuard guard(lock_);
    position = guard.owns() ? order_.record_of(word(event)) : ring_.pushed();
  }
  return answer_not_ready(caller, position);
}

// ---- news for the queue

void Queue::kernel_launched(const Call& call) noexcept {
  if (!active() || !call.meaning.known || driver::functions().find(call.function) == nullptr) return;
  driver::Functions::Known known;
  if (!driver::functions().find(call.function, known)) return;
  driver::functions().succeeded(like_of(call, known.serial, device_));
}

void Queue::event_destroyed(CUevent event) noexcept {
  const SpinGuard guard(lock_);
  if (guard.owns()) order_.forget_event(word(event));
}

void Queue::stream_destroyed(CUstream stream) noexcept {
  const SpinGuard guard(lock_);
  if (guard.owns()) order_.forget_stream(word(stream));
}

void Queue::context_gone() noexcept {
  launcher_.forget_context();
  mailbox_.mend();
  const SpinGuard guard(lock_);
  if (guard.owns()) order_.forget_streams_and_events();
}

}  // namespace cudasched::queue
