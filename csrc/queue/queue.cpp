#include "queue/queue.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/hash.hpp"
#include "driver/functions.hpp"
#include "driver/registry.hpp"

namespace cudasched::queue {
namespace {

constexpr unsigned kMaxAttributes = 32;
constexpr std::size_t kMaxEvents = 2;

template <typename Handle>
std::uint64_t word(Handle handle) noexcept {
  return reinterpret_cast<std::uint64_t>(handle);
}

// What a launch's attributes mean for it. `known`: the code knows each of them, and can copy it.
struct Attributes {
  bool known = true;
  bool cooperative = false;
  std::uint64_t hash = 0;
  unsigned cluster[3] = {1, 1, 1};
  std::array<CUevent, kMaxEvents> events{};
  std::size_t event_count = 0;

  void records(CUevent event, int flags) noexcept {
    known = known && event != nullptr && flags == 0 && event_count < kMaxEvents;
    if (known) events[event_count++] = event;
  }
};

Attributes read(const CUlaunchAttribute* attributes, unsigned count) noexcept {
  Attributes result;
  if (count > kMaxAttributes || (count != 0 && attributes == nullptr)) {
    result.known = false;
    return result;
  }
  for (unsigned i = 0; i < count && result.known; ++i) {
    const CUlaunchAttributeValue& value = attributes[i].value;
    // As a number: a newer CUDA has values that the enumeration does not.
    unsigned id = 0;
    std::memcpy(&id, &attributes[i].id, sizeof id);
    result.hash = mix(result.hash, id);
    const auto add = [&](auto number) { result.hash = mix(result.hash, static_cast<std::uint64_t>(number)); };
    switch (id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
        break;
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        result.cooperative = value.cooperative != 0;
        add(value.cooperative);
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        result.cluster[0] = value.clusterDim.x;
        result.cluster[1] = value.clusterDim.y;
        result.cluster[2] = value.clusterDim.z;
        for (const unsigned size : result.cluster) add(size);
        break;
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
        add(value.preferredClusterDim.x);
        add(value.preferredClusterDim.y);
        add(value.preferredClusterDim.z);
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
        add(value.clusterSchedulingPolicyPreference);
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
        add(value.programmaticStreamSerializationAllowed);
        break;
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
        add(value.priority);
        break;
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
        add(value.memSyncDomain);
        break;
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        add(value.sharedMemCarveout);
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
        result.records(value.programmaticEvent.event, value.programmaticEvent.flags);
        break;
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
        result.records(value.launchCompletionEvent.event, value.launchCompletionEvent.flags);
        break;
      default:  // unknown, or it gives something back
        result.known = false;
        break;
    }
  }
  return result;
}

// Limits that depend on the grid, which a launch's like says nothing of.
bool within_limits(const unsigned (&grid)[3], const unsigned (&cluster)[3]) noexcept {
  constexpr unsigned kLargest[3] = {0x7fff'ffff, 0xffff, 0xffff};
  for (int i = 0; i < 3; ++i) {
    if (grid[i] == 0 || grid[i] > kLargest[i] || cluster[i] == 0 || grid[i] % cluster[i] != 0) return false;
  }
  return true;
}

// What a launch shares with those that succeed as it does. `device`: where a kernel is loaded lazily, each device loads
// its own.
std::uint64_t like_of(const KernelCall& call, const Attributes& attributes, std::uint64_t serial, int device) noexcept {
  std::uint64_t hash = mix(mix(mix(1, serial), static_cast<std::uint64_t>(device)), attributes.hash);
  for (const unsigned size : call.block) hash = mix(hash, size);
  hash = mix(mix(hash, call.shared_bytes), call.cooperative ? 2 : 1);
  // How large a cooperative grid may be depends on everything else.
  const bool whole_grid = call.cooperative || attributes.cooperative;
  for (const unsigned size : call.grid) hash = mix(hash, whole_grid ? size : 0);
  return hash == 0 ? 1 : hash;
}

// The packed parameters of `extra`; false where it says anything else.
bool read_extra(void** extra, void*& packed, std::size_t& bytes) noexcept {
  bool has_pointer = false;
  bool has_size = false;
  for (int i = 0; i < 2; ++i) {
    if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      packed = extra[1];
      has_pointer = packed != nullptr;
    } else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE && extra[1] != nullptr) {
      bytes = *static_cast<const std::size_t*>(extra[1]);
      has_size = true;
    } else {
      return false;
    }
    extra += 2;
  }
  return has_pointer && has_size && extra[0] == CU_LAUNCH_PARAM_END;
}

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

Queue::Queue(const Calls& calls, Admission& admission, GilCheck holds_gil, std::uint32_t slots,
             std::uint32_t arena_bytes) noexcept
    : calls_(calls),
      holds_gil_(holds_gil),
      ring_(slots, arena_bytes),
      launcher_(ring_, lock_, mailbox_, calls, admission) {}

// ---- life

bool Queue::start() noexcept {
  if (!ring_.usable() || !launcher_.start()) return false;
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
  lock_.unlock();  // a thread that is not here may have held it
}

void Queue::latency_came() noexcept {
  // With the claim and the look in open_for(): one of the two opens the gate.
  process_has_latency_.store(true, std::memory_order_seq_cst);
  launcher_.open_until(claimed_.load(std::memory_order_seq_cst));
}

// ---- deferred

Queue::Whose Queue::kind_of(CUstream stream, StreamKind& kind) const noexcept {
  if (stream == CU_STREAM_LEGACY || stream == nullptr) {
    kind = StreamKind::kLegacy;
    return Whose::kOurs;
  }
  if (stream == CU_STREAM_PER_THREAD) {
    kind = StreamKind::kPerThread;
    return Whose::kOurs;
  }
  driver::StreamFacts facts;
  if (!driver::registry().look_up(stream, facts)) return Whose::kUnknown;
  if (facts.device >= 0 && device_ >= 0 && facts.device != device_) return Whose::kOthers;
  kind = facts.blocking ? StreamKind::kBlocking : StreamKind::kNonBlocking;
  return Whose::kOurs;
}

// All under the lock: may(bytes) decides and says how much the operation carries, fill(operation, data, position)
// writes it and keeps the books.
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
        operation->thread = caller.thread;
        operation->context = context;
        order_.passed(ring_.passed());
        fill(*operation, data, ring_.pushed() + 1);
        ring_.publish();
        return true;
      }
      // What may not wait behind the gate opens it for no more than it must.
      room = opens_the_gate(caller, wait) ? std::min(ring_.passed() + 1, ring_.pushed()) : ring_.position_with_room();
    }
    drain(caller, room, wait);
  }
}

// An operation on a stream.
template <typename May, typename Fill>
bool Queue::push(const Caller& caller, CUstream stream, Waiter::For wait, May&& may, Fill&& fill) noexcept {
  StreamKind kind = StreamKind::kLegacy;
  if (!active() || stream == CU_STREAM_PER_THREAD || kind_of(stream, kind) != Whose::kOurs) return false;
  return push_locked(caller, caller.context, wait, may, [&](Operation& operation, std::byte* data, Position position) {
    operation.stream = stream;
    fill(operation, data, position);
    order_.stream_used(word(stream), kind, position);
  });
}

bool Queue::push_kernel(const Caller& caller, const KernelCall& call) noexcept {
  if (!active()) return false;
  const Attributes attributes = read(call.attributes, call.attribute_count);
  if (!attributes.known || !within_limits(call.grid, attributes.cluster)) return false;
  void* packed = nullptr;
  std::size_t packed_bytes = 0;
  if (call.extra != nullptr) {
    if (call.parameters != nullptr || call.cooperative || !read_extra(call.extra, packed, packed_bytes)) return false;
  }

  driver::Functions::Known known;
  if (!driver::functions().find(call.function, known) || !known.facts->described) return false;
  if (!driver::functions().has_succeeded(like_of(call, attributes, known.serial, device_))) return false;
  const std::vector<driver::Parameter>& parameters = known.facts->parameters;
  if (!parameters.empty() && call.parameters == nullptr && packed == nullptr) return false;
  const std::size_t attribute_bytes = aligned(call.attribute_count * sizeof(CUlaunchAttribute));
  const std::size_t pointer_bytes = packed != nullptr ? 0 : aligned(parameters.size() * sizeof(void*));
  const auto may = [&](std::size_t& bytes) {
    bytes = attribute_bytes + pointer_bytes + (packed != nullptr ? packed_bytes : known.facts->block_bytes);
    return std::all_of(attributes.events.begin(),
                       attributes.events.begin() + static_cast<std::ptrdiff_t>(attributes.event_count),
                       may_defer_record);
  };
  return push(caller, call.stream, Waiter::For::kLaunch, may,
              [&](Operation& operation, std::byte* data, Position position) {
                operation.kind = Operation::Kind::kKernel;
                operation.kernel = {};
                Operation::Kernel& kernel = operation.kernel;
                kernel.function = call.function;
                std::copy_n(call.grid, 3, kernel.grid);
                std::copy_n(call.block, 3, kernel.block);
                kernel.shared_bytes = call.shared_bytes;
                kernel.cooperative = call.cooperative;
                if (call.attribute_count != 0) {
                  kernel.attributes = reinterpret_cast<CUlaunchAttribute*>(data);
                  kernel.attribute_count = call.attribute_count;
                  std::memcpy(data, call.attributes, call.attribute_count * sizeof(CUlaunchAttribute));
                }
                std::byte* const block = data + attribute_bytes + pointer_bytes;
                if (packed != nullptr) {
                  kernel.packed = block;
                  kernel.packed_bytes = packed_bytes;
                  std::memcpy(block, packed, packed_bytes);
                } else if (!parameters.empty()) {
                  kernel.parameters = reinterpret_cast<void**>(data + attribute_bytes);
                  for (std::size_t i = 0; i < parameters.size(); ++i) {
                    const driver::Parameter parameter = parameters[i];
                    kernel.parameters[i] = block + parameter.offset;
                    std::memcpy(kernel.parameters[i], call.parameters[i], parameter.bytes);
                  }
                }
                for (std::size_t i = 0; i < attributes.event_count; ++i) {
                  order_.event_recorded(word(attributes.events[i]), position);
                  driver::registry().recorded(attributes.events[i], false);
                }
              });
}

bool Queue::push_graph(const Caller& caller, CUgraphExec graph, CUstream stream) noexcept {
  return push(
      caller, stream, Waiter::For::kLaunch, [&](std::size_t&) { return may_defer(graph); },
      [&](Operation& operation, std::byte*, Position) {
        operation.kind = Operation::Kind::kGraph;
        operation.graph = {graph};
      });
}

bool Queue::push_fill(const Caller& caller, const Operation::Fill& fill, bool rows, CUstream stream) noexcept {
  return push(
      caller, stream, Waiter::For::kOther, [](std::size_t&) { return true; },
      [&](Operation& operation, std::byte*, Position) {
        operation.kind = rows ? Operation::Kind::kFillRows : Operation::Kind::kFill;
        operation.fill = fill;
      });
}

bool Queue::push_copy(const Caller& caller, const Operation::Copy& copy, CUstream stream) noexcept {
  return push(
      caller, stream, Waiter::For::kOther, [](std::size_t&) { return true; },
      [&](Operation& operation, std::byte*, Position) {
        operation.kind = Operation::Kind::kCopy;
        operation.copy = copy;
      });
}

bool Queue::push_record(const Caller& caller, CUevent event, CUstream stream, unsigned flags) noexcept {
  if (flags != CU_EVENT_RECORD_DEFAULT || event == nullptr) return false;
  return push(
      caller, stream, Waiter::For::kOther, [&](std::size_t&) { return may_defer_record(event); },
      [&](Operation& operation, std::byte*, Position position) {
        operation.kind = Operation::Kind::kRecord;
        operation.event = {event, flags};
        order_.event_recorded(word(event), position);
        driver::registry().recorded(event, false);
      });
}

bool Queue::push_wait(const Caller& caller, CUstream stream, CUevent event, unsigned flags) noexcept {
  if (flags != CU_EVENT_WAIT_DEFAULT || event == nullptr) return false;
  return push(
      caller, stream, Waiter::For::kOther, [&](std::size_t&) { return may_defer_wait(event); },
      [&](Operation& operation, std::byte*, Position position) {
        operation.kind = Operation::Kind::kWait;
        operation.event = {event, flags};
        order_.event_awaited(word(event), position);
      });
}

bool Queue::push_host_function(const Caller& caller, CUhostFn function, void* data, CUstream stream) noexcept {
  if (function == nullptr) return false;
  return push(
      caller, stream, Waiter::For::kOther, [](std::size_t&) { return true; },
      [&](Operation& operation, std::byte*, Position) {
        operation.kind = Operation::Kind::kHostFunction;
        operation.host = {function, data};
      });
}

bool Queue::push_free(const Caller& caller, CUdeviceptr address, CUstream stream) noexcept {
  if (calls_.free_memory == nullptr) return false;
  return push(
      caller, stream, Waiter::For::kOther, [](std::size_t&) { return true; },
      [&](Operation& operation, std::byte*, Position) {
        operation.kind = Operation::Kind::kFreeMemory;
        operation.memory = {address};
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

// ---- drained

Position Queue::before(Scope scope, CUstream stream, CUevent event, CUevent other) noexcept {
  if (scope == Scope::kNothing || ring_.empty()) return 0;
  if (scope == Scope::kEnd) return ring_.pushed();
  StreamKind kind = StreamKind::kLegacy;
  bool has_stream = scope == Scope::kStream || scope == Scope::kStreamAndEvent;
  if (has_stream) {
    // A stream that the driver does not know: it will say so itself.
    const Whose whose = kind_of(stream, kind);
    if (whose == Whose::kUnknown) return ring_.pushed();
    if (whose == Whose::kOthers) {
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
  // Should latency work come to this process while this thread waits, it must not go on waiting behind a closed gate.
  Position claimed = claimed_.load(std::memory_order_relaxed);
  while (claimed < position && !claimed_.compare_exchange_weak(claimed, position, std::memory_order_seq_cst)) {
  }
  if (process_has_latency_.load(std::memory_order_seq_cst)) launcher_.open_until(position);
}

void Queue::drain(const Caller& caller, Position position, Waiter::For what) noexcept {
  if (position <= ring_.passed()) return;
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
  if (kind_of(stream, kind) != Whose::kOurs) return false;
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

// ---- what the queue must be told

void Queue::kernel_launched(const KernelCall& call) noexcept {
  if (!active()) return;
  const Attributes attributes = read(call.attributes, call.attribute_count);
  driver::Functions::Known known;
  if (!attributes.known || driver::functions().find(call.function) == nullptr) return;
  if (!driver::functions().find(call.function, known)) return;
  driver::functions().succeeded(like_of(call, attributes, known.serial, device_));
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
