// Work into the device: commands, waits and launches of graphs (driver.hpp).
#include <algorithm>
#include <utility>

#include "simulated_driver/driver.hpp"

namespace cudasched::simulated_driver {
namespace {

SharedDevice& shared_of(const Stream& stream) { return gpu(stream.context->device).shared; }

// Makes sure that the context can take `count` operations without waiting. Unlocks during the wait; the caller holds
// `submitting`, so that no other thread fills the room.
void make_room(Lock& lock, const Stream& stream, std::uint64_t count) {
  const Context& context = *stream.context;
  const auto has_room = [&] {
    if (context.slot < 0) return true;
    SharedDevice::Guard device(shared_of(stream));
    return static_cast<std::uint64_t>(kOpsPerContext - device->op_count(context.slot)) >= count;
  };
  if (!has_room()) wait_until(lock, context.device, has_room);
  require_sound(context);
}

Ticket submit_work(SharedDevice::Guard& device, const std::shared_ptr<Stream>& stream, const Work& work,
                   Command command, const std::shared_ptr<Record>& record = nullptr,
                   std::shared_ptr<const void> keeps = nullptr) {
  Context& context = *stream->context;
  Ticket ticket = 0;
  const Status status = device->submit(context.slot, stream->place, work, &ticket);
  require(status != Status::kFull, CUDA_ERROR_OUT_OF_MEMORY);
  require(status == Status::kOk);
  ++stream->submitted;
  stream->last = ticket;
  if (record) record->ticket = ticket;
  context.pending[static_cast<std::size_t>(Device::op_index(ticket))] = {stream, std::move(command), record,
                                                                         std::move(keeps)};
  return ticket;
}

void submit_model_wait(SharedDevice::Guard& device, const std::shared_ptr<Stream>& stream, Ticket awaited) {
  if (!device->is_complete(awaited)) submit_work(device, stream, {.kind = OpKind::kWait, .wait_for = awaited}, {});
}

// The implicit order between the legacy default stream and the blocking streams.
void order_with_default_stream(SharedDevice::Guard& device, const std::shared_ptr<Stream>& stream) {
  Context& context = *stream->context;
  if (!stream->blocking()) return;
  if (stream->kind != StreamKind::kLegacy) {
    const Ticket legacy = context.legacy->last;
    if (legacy == 0 || legacy == stream->last_legacy_wait) return;
    stream->last_legacy_wait = legacy;
    return submit_model_wait(device, stream, legacy);
  }
  for (const auto& [key, other] : context.streams) {
    if (other == stream || !other->blocking() || other->last == 0 || other->last == other->legacy_waited_for) continue;
    other->legacy_waited_for = other->last;
    submit_model_wait(device, stream, other->last);
  }
}

std::uint64_t default_stream_waits(const Stream& stream) {
  return stream.kind == StreamKind::kLegacy ? stream.context->streams.size() : 1;
}

// submit(device) one operation, behind the default stream's.
template <class F>
void submit_one(Lock& lock, const std::shared_ptr<Stream>& stream, F submit) {
  lock.unlock();
  const Lock turn(driver().submitting);
  lock.lock();
  make_room(lock, *stream, default_stream_waits(*stream) + 1);
  SharedDevice::Guard device(shared_of(*stream));
  order_with_default_stream(device, stream);
  submit(device);
}

// Operations of one graph launch, put into the device as there is room. Holds the device's lock in between.
class GraphSubmission {
 public:
  GraphSubmission(Lock& lock, const std::shared_ptr<Stream>& stream, std::uint64_t op_count)
      : lock_(lock), stream_(stream), left_(op_count) {}

  // Waits for a completed operation of the same context, which the ticket names.
  void wait(const std::shared_ptr<Stream>& stream, Ticket awaited) {
    enter();
    submit_model_wait(*device_, stream, awaited);
  }

  Ticket work(const std::shared_ptr<Stream>& stream, const Work& work, Command command,
              const std::shared_ptr<Record>& record = nullptr, std::shared_ptr<const void> keeps = nullptr) {
    enter();
    return submit_work(*device_, stream, work, std::move(command), record, std::move(keeps));
  }

  // Until all work of the stream is done, with its effects.
  void settle(const std::shared_ptr<Stream>& stream) {
    const Context& context = *stream->context;
    auto record = std::make_shared<Record>();
    record->context = stream->context.get();
    work(stream, {}, {}, record);
    device_.reset();
    room_ = 0;
    wait_until(lock_, context.device, [&] { return record->done || context.slot < 0; });
    require_sound(context);
  }

  void expect(std::uint64_t op_count) { left_ += op_count; }

  void order_with_default() {
    const std::uint64_t waits = default_stream_waits(*stream_);
    left_ += waits;
    enter(waits);
    order_with_default_stream(*device_, stream_);
  }

 private:
  static constexpr std::uint64_t kStep = 256;

  // Room for `count` operations more.
  void enter(std::uint64_t count = 1) {
    if (room_ < count || !device_) {
      device_.reset();
      room_ = std::max(count, std::min(left_, room_ == 0 && first_ ? std::uint64_t{kOpsPerContext} : kStep));
      first_ = false;
      make_room(lock_, *stream_, room_);
      device_.emplace(shared_of(*stream_));
    }
    room_ -= count;
    left_ -= std::min(left_, count);
  }

  Lock& lock_;
  const std::shared_ptr<Stream>& stream_;  // of the launch
  std::uint64_t left_;
  std::uint64_t room_ = 0;
  bool first_ = true;
  std::optional<SharedDevice::Guard> device_;
};

// The stream and as many lanes as the graph wants, less where the context has no more streams.
std::vector<std::shared_ptr<Stream>> choose_lanes(const std::shared_ptr<Stream>& stream, std::size_t count) {
  constexpr std::size_t kLanesOfContext = 64;
  const std::shared_ptr<Context>& context = stream->context;
  std::vector<std::shared_ptr<Stream>> lanes{stream};
  std::vector<std::shared_ptr<Stream>> busy;
  {
    SharedDevice::Guard device(shared_of(*stream));
    for (const auto& lane : context->lanes) {
      if (lanes.size() == count) break;
      (device->is_complete(lane->last) ? lanes : busy).push_back(lane);
    }
  }
  while (lanes.size() < count && context->lanes.size() < kLanesOfContext) {
    const std::shared_ptr<Stream> lane = make_stream(context, StreamKind::kLane, CU_STREAM_NON_BLOCKING, 0);
    if (lane == nullptr) break;
    context->lanes.push_back(lane);
    lanes.push_back(lane);
  }
  for (std::size_t i = 0; lanes.size() < count && i < busy.size(); ++i) lanes.push_back(busy[i]);
  return lanes;
}

// Memory that a launch allocates must have been freed since the launch before, and the reverse.
void check_graph_memory(const Exec& exec) {
  const bool auto_free = (exec.flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) != 0;
  std::unordered_map<const GraphMemory*, bool> live;
  for (std::size_t i = 0; i < exec.states->size(); ++i) {
    const auto* const of = std::get_if<GraphMemoryCommand>(&(*exec.states)[i].command);
    if (of == nullptr) continue;
    const bool allocates = exec.structure->nodes[i].type == CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    const auto [entry, fresh] = live.try_emplace(of->memory.get(), of->memory->live && !(allocates && auto_free));
    require(entry->second != allocates);
    entry->second = allocates;
  }
}

bool decided(const ExecNode& node, std::size_t& chosen) {
  const auto found = driver().conditions.find(node.condition);
  const unsigned value = found == driver().conditions.end() ? 0 : found->second.value;
  switch (node.decides) {
    case CU_GRAPH_COND_TYPE_IF:
      chosen = value != 0 ? 0 : 1;
      break;
    case CU_GRAPH_COND_TYPE_WHILE:
      chosen = value != 0 ? 0 : node.bodies.size();
      break;
    default:
      chosen = value;
  }
  return chosen < node.bodies.size();
}

Work work_of_node(const Command& command, int priority) {
  return work_of(command, std::clamp(priority, kGreatestPriority, 0));
}

// A conditional node whose dependencies are earlier in the stream.
void submit_conditional(GraphSubmission& submission, const std::shared_ptr<Stream>& stream, const ExecNode& node) {
  submission.settle(stream);
  for (std::size_t chosen = 0; decided(node, chosen);) {
    const ExecBody& body = *node.bodies[chosen];
    submission.expect(body.structure->op_count);
    for (std::size_t i = 0; i < body.states.size(); ++i) {
      const ExecNode& inner = body.structure->nodes[i];
      const ExecState& state = body.states[i];
      if (inner.type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
        submit_conditional(submission, stream, inner);
      } else {
        submission.work(stream, work_of_node(state.command, state.priority), state.command);
      }
    }
    if (node.decides != CU_GRAPH_COND_TYPE_WHILE) break;
    submission.settle(stream);
  }
}

// A node whose dependencies are in the device.
Ticket submit_node(GraphSubmission& submission, const std::shared_ptr<Stream>& lane, const ExecNode& node,
                   const ExecState& state) {
  std::shared_ptr<Record> record;
  const auto* const event = std::get_if<EventCommand>(&state.command);
  if (event != nullptr && node.type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
    record = std::make_shared<Record>();
    record->context = lane->context.get();
  } else if (event != nullptr && event->event->record && !event->event->record->done) {
    submission.wait(lane, event->event->record->ticket);
  }
  if (const auto* const memory = std::get_if<GraphMemoryCommand>(&state.command)) {
    memory->memory->live = node.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC;
  }
  if (node.type == CU_GRAPH_NODE_TYPE_CONDITIONAL) submit_conditional(submission, lane, node);
  Command command = state.enabled ? state.command : Command{};
  const Work work = work_of_node(command, state.priority);
  const Ticket ticket = submission.work(lane, work, std::move(command), record);
  if (record) event->event->record = std::move(record);
  return ticket;
}

}  // namespace

void submit_command(Lock& lock, const std::shared_ptr<Stream>& stream, Command command, std::shared_ptr<Record> record,
                    std::optional<int> priority) {
  submit_one(lock, stream, [&](SharedDevice::Guard& device) {
    const Work work = work_of(command, priority.value_or(stream->priority));
    submit_work(device, stream, work, std::move(command), record);
  });
}

void submit_wait(Lock& lock, const std::shared_ptr<Stream>& stream, const std::shared_ptr<Record>& record) {
  if (record->done) return;
  if (record->context->device != stream->context->device) {
    return wait_until(lock, record->context->device, [&] { return record->done; });
  }
  submit_one(lock, stream, [&](SharedDevice::Guard& device) { submit_model_wait(device, stream, record->ticket); });
}

void submit_exec(Lock& lock, const std::shared_ptr<Stream>& stream, const std::shared_ptr<Exec>& exec) {
  lock.unlock();
  const Lock turn(driver().submitting);
  lock.lock();
  const std::shared_ptr<Context> context = stream->context;
  require_sound(*context);
  require(driver().execs.contains(exec.get()), CUDA_ERROR_INVALID_HANDLE);
  check_graph_memory(*exec);
  if (exec->context != context) {
    exec->last = 0;
    exec->context = context;
  }
  const auto structure = exec->structure;
  const auto states = exec->states;
  const auto holds = exec->holds;
  const std::vector<std::shared_ptr<Stream>> lanes = choose_lanes(stream, structure->lane_count);
  GraphSubmission submission(lock, stream, structure->op_count);
  submission.order_with_default();
  submission.wait(stream, exec->last);
  if (!exec->defaults.empty()) {
    // The conditions at the launch's turn: after the launch before has set them.
    submission.settle(stream);
    for (const CUgraphConditionalHandle handle : exec->defaults) {
      Condition& condition = driver().conditions.at(handle);
      condition.value = condition.default_value;
    }
  }
  const Ticket start = submission.work(stream, {}, {});
  std::vector<bool> started(lanes.size(), false);
  std::vector<Ticket> tickets(structure->nodes.size(), 0);
  for (std::size_t i = 0; i < structure->nodes.size(); ++i) {
    const ExecNode& node = structure->nodes[i];
    const std::size_t lane = node.lane % lanes.size();
    if (lane != 0 && !started[lane]) {
      started[lane] = true;
      submission.wait(lanes[lane], start);
    }
    for (const std::size_t dependency : node.dependencies) {
      if (structure->nodes[dependency].lane % lanes.size() != lane) submission.wait(lanes[lane], tickets[dependency]);
    }
    tickets[i] = submit_node(submission, lanes[lane], node, (*states)[i]);
  }
  for (std::size_t lane = 1; lane < lanes.size(); ++lane) {
    if (started[lane]) submission.wait(stream, lanes[lane]->last);
  }
  exec->last = submission.work(stream, {}, {}, nullptr, holds);
}

}  // namespace cudasched::simulated_driver
