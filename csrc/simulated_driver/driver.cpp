#include "simulated_driver/driver.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/clock.hpp"
#include "simulated_driver/capture.hpp"
#include "simulated_driver/resource_manager.hpp"

namespace cudasched::simulated_driver {
namespace {

constexpr std::int64_t kSleepMaxNs = kNsPerMs;
constexpr std::int64_t kSleepMinNs = 20 * kNsPerUs;
constexpr int kDevicesMax = 64;
constexpr int kVersionDefault = 13000;

std::atomic<bool> g_initialized{false};
std::atomic<bool> g_forked{false};

template <class T>
bool read_setting(const char* name, T least, T most, T& value) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return true;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  return error == std::errc{} && *end == '\0' && value >= least && value <= most;
}

SharedDevice& shared_of(const Context& context) {
  return driver().gpus[static_cast<std::size_t>(context.device)]->shared;
}

// A thread's state; its end closes the thread's default streams.
struct ThreadState {
  std::uint64_t id = 0;
  std::vector<Context*> stack;

  ~ThreadState() {
    if (id == 0 || g_forked.load(std::memory_order_relaxed)) return;
    const Lock lock(driver().mutex);
    for (const auto& [key, context] : driver().contexts) {
      const auto stream = context->per_thread.find(id);
      if (stream == context->per_thread.end()) continue;
      close_stream(stream->second);
      context->per_thread.erase(stream);
    }
  }
};

thread_local ThreadState t_state;

void drop_module_functions(Module& module) {
  for (const auto& function : module.functions) driver().functions.erase(function.get());
}

// Makes sure that the context can take `count` operations without waiting. Unlocks during the wait; the caller holds
// `submitting`, so that no other thread fills the room.
void make_room(Lock& lock, const std::shared_ptr<Context>& context, std::uint64_t count) {
  const auto has_room = [&] {
    if (context->slot < 0) return true;
    SharedDevice::Guard device(shared_of(*context));
    return static_cast<std::uint64_t>(kOpsPerContext - device->op_count(context->slot)) >= count;
  };
  if (!has_room()) wait_until(lock, context->device, has_room);
}

CUresult submit_work(SharedDevice::Guard& device, const std::shared_ptr<Stream>& stream, const Work& work,
                     Command command, const std::shared_ptr<Record>& record, Ticket* ticket,
                     std::shared_ptr<const void> keeps = nullptr) {
  Context& context = *stream->context;
  const Status status = device->submit(context.slot, stream->place, work, ticket);
  if (status != Status::kOk) return status == Status::kFull ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
  ++stream->submitted;
  stream->last = *ticket;
  if (record) record->ticket = *ticket;
  context.pending[static_cast<std::size_t>(Device::op_index(*ticket))] = {stream, std::move(command), record,
                                                                          std::move(keeps)};
  return CUDA_SUCCESS;
}

CUresult submit_model_wait(SharedDevice::Guard& device, const std::shared_ptr<Stream>& stream, Ticket awaited) {
  if (device->is_complete(awaited)) return CUDA_SUCCESS;
  Ticket ticket = 0;
  return submit_work(device, stream, {.kind = OpKind::kWait, .wait_for = awaited}, {}, nullptr, &ticket);
}

// The implicit order between the legacy default stream and the blocking streams.
CUresult order_with_default_stream(SharedDevice::Guard& device, const std::shared_ptr<Stream>& stream) {
  Context& context = *stream->context;
  if (!stream->blocking()) return CUDA_SUCCESS;
  if (stream->kind != StreamKind::kLegacy) {
    const Ticket legacy = context.legacy->last;
    if (legacy == 0 || legacy == stream->last_legacy_wait) return CUDA_SUCCESS;
    stream->last_legacy_wait = legacy;
    return submit_model_wait(device, stream, legacy);
  }
  for (const auto& [key, other] : context.streams) {
    if (other == stream || !other->blocking() || other->last == 0 || other->last == other->legacy_waited_for) continue;
    other->legacy_waited_for = other->last;
    if (const CUresult result = submit_model_wait(device, stream, other->last); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

std::uint64_t default_stream_waits(const Stream& stream) {
  return stream.kind == StreamKind::kLegacy ? stream.context->streams.size() : 1;
}

CUresult context_state(const Context& context) {
  return context.slot < 0 ? CUDA_ERROR_CONTEXT_IS_DESTROYED : context.sticky;
}

// Large memory costs the machine only its touched pages, so that a test can fill the device.
constexpr std::size_t kMappedBytes = std::size_t{256} << 20;

void* take_memory(std::size_t bytes) {
  if (bytes >= kMappedBytes) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    return mapped == MAP_FAILED ? nullptr : mapped;
  }
  constexpr std::size_t kAlignment = 256;
  return std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
}

void give_memory_back(void* memory, std::size_t bytes) {
  if (bytes >= kMappedBytes) {
    munmap(memory, bytes);
  } else {
    std::free(memory);
  }
}

}  // namespace

Driver& driver() {
  static auto* const instance = new Driver;  // never destroyed: threads may outlive static destructors
  return *instance;
}

CUresult may_call() {
  if (!g_initialized.load(std::memory_order_acquire) || g_forked.load(std::memory_order_relaxed)) {
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  return in_host_function() ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS;
}

CUresult initialize_driver() {
  if (g_forked.load(std::memory_order_relaxed)) return CUDA_ERROR_NOT_INITIALIZED;
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (state.initialized) return CUDA_SUCCESS;
  int devices = 1;
  int version = kVersionDefault;
  int memory_mib = kMemoryMiBDefault;
  if (!read_setting("CUDASCHED_SIM_SCALE", 0.001, 10000.0, state.scale) ||
      !read_setting("CUDASCHED_SIM_DEVICES", 0, kDevicesMax, devices) ||
      !read_setting("CUDASCHED_SIM_MIG", 0, 1, state.mig) ||
      !read_setting("CUDASCHED_SIM_INTEGRATED", 0, 1, state.integrated) ||
      !read_setting("CUDASCHED_SIM_MEMORY_MB", 1, kMemoryMiBMax, memory_mib) ||
      !read_setting("CUDASCHED_SIM_DRIVER_VERSION", 1000, 99990, version)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const char* directory = std::getenv("CUDASCHED_SIM_DIR");
  state.directory =
      directory != nullptr && *directory != '\0' ? directory : "/dev/shm/cudasched-sim-" + std::to_string(geteuid());
  if (devices == 0) return CUDA_ERROR_NO_DEVICE;
  for (int ordinal = static_cast<int>(state.gpus.size()); ordinal < devices; ++ordinal) {
    auto gpu = std::make_unique<SimulatedGpu>();
    const int error = gpu->shared.open(state.directory, ordinal, state.scale, std::uint64_t(memory_mib) << 20);
    if (error == ENOSPC || error == ENOMEM) return CUDA_ERROR_OUT_OF_MEMORY;
    if (error == EPROTO) return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    if (error != 0) return CUDA_ERROR_OPERATING_SYSTEM;
    gpu->primary = std::make_shared<Context>();
    gpu->primary->device = ordinal;
    gpu->primary->primary = true;
    gpu->primary->id = state.next_id++;
    state.contexts.emplace(gpu->primary.get(), gpu->primary);
    state.gpus.push_back(std::move(gpu));
  }
  pthread_atfork(nullptr, nullptr, [] { g_forked.store(true, std::memory_order_relaxed); });
  state.initialized = true;
  g_initialized.store(true, std::memory_order_release);
  return CUDA_SUCCESS;
}

int driver_version() {
  static const int version = [] {
    int read = kVersionDefault;
    return read_setting("CUDASCHED_SIM_DRIVER_VERSION", 1000, 99990, read) ? read : kVersionDefault;
  }();
  return version;
}

std::uint64_t thread_id() {
  static std::atomic<std::uint64_t> next{1};
  if (t_state.id == 0) t_state.id = next.fetch_add(1, std::memory_order_relaxed);
  return t_state.id;
}

std::vector<Context*>& context_stack() { return t_state.stack; }

CUresult current_context(std::shared_ptr<Context>& context) {
  const std::vector<Context*>& stack = context_stack();
  if (stack.empty() || stack.back() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const auto found = driver().contexts.find(stack.back());
  if (found == driver().contexts.end()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  context = found->second;
  return context_state(*context);
}

const Green* current_green() {
  const std::vector<Context*>& stack = context_stack();
  if (stack.empty()) return nullptr;
  const auto found = driver().greens.find(reinterpret_cast<Green*>(stack.back()));
  return found == driver().greens.end() ? nullptr : found->second.get();
}

CUresult activate_context(Context& context) {
  SharedDevice& shared = shared_of(context);
  {
    SharedDevice::Guard device(shared);
    const Status status = shared.create_context(device, &context.slot);
    if (status != Status::kOk) {
      context.slot = -1;
      return status == Status::kFull ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM;
    }
  }
  make_channel_group(context);
  context.sticky = CUDA_SUCCESS;
  context.pending.assign(kOpsPerContext, {});
  return make_stream(driver().contexts.at(&context), StreamKind::kLegacy, 0, 0, context.legacy);
}

void release_primary(Lock& lock, const std::shared_ptr<Context>& primary) {
  if (--primary->retained == 0) deactivate_context(lock, primary);
}

void deactivate_context(Lock& lock, const std::shared_ptr<Context>& context) {
  wait_until(lock, context->device, [&] {
    return context->slot < 0 || std::all_of(context->streams.begin(), context->streams.end(),
                                            [](const auto& entry) { return stream_idle(*entry.second); });
  });
  if (context->slot < 0) return;
  Driver& state = driver();
  const auto ours = [&](const auto& owner) { return owner == context; };
  std::erase_if(state.greens, [&](const auto& entry) {
    if (!ours(entry.second->primary)) return false;
    state.contexts.erase(reinterpret_cast<Context*>(entry.first));
    return true;
  });
  std::erase_if(state.streams, [&](const auto& entry) { return ours(entry.second->context); });
  std::erase_if(state.events, [&](const auto& entry) { return ours(entry.second->context); });
  std::erase_if(state.modules, [&](const auto& entry) {
    if (!ours(entry.second->context)) return false;
    drop_module_functions(*entry.second);
    return true;
  });
  for (const auto& [key, library] : state.libraries) {
    const auto module = library->modules.find(context.get());
    if (module == library->modules.end()) continue;
    drop_module_functions(*module->second);
    library->modules.erase(module);
  }
  for (const auto& [key, exec] : state.execs) {
    if (!ours(exec->context)) continue;
    exec->context = nullptr;
    exec->last = 0;
  }
  std::vector<std::uintptr_t> addresses;
  for (const auto& [address, allocation] : state.allocations) {
    if (ours(allocation.context)) addresses.push_back(address);
  }
  for (const std::uintptr_t address : addresses) release_memory(address);
  free_channel_group(*context);
  SharedDevice& shared = shared_of(*context);
  {
    SharedDevice::Guard device(shared);
    shared.destroy_context(device, context->slot);
  }
  context->slot = -1;
  context->legacy = nullptr;
  context->per_thread.clear();
  context->streams.clear();
  context->lanes.clear();
  context->pending.clear();
}

CUresult make_stream(const std::shared_ptr<Context>& context, StreamKind kind, unsigned flags, int priority,
                     std::shared_ptr<Stream>& stream) {
  int place = 0;
  {
    SharedDevice::Guard device(shared_of(*context));
    if (device->create_stream(context->slot, &place) != Status::kOk) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  stream = std::make_shared<Stream>();
  stream->context = context;
  stream->kind = kind;
  stream->place = place;
  stream->flags = flags;
  stream->priority = std::clamp(priority, kGreatestPriority, 0);
  stream->green = current_green();
  stream->id = driver().next_id++;
  context->streams.emplace(stream.get(), stream);
  return CUDA_SUCCESS;
}

void close_stream(const std::shared_ptr<Stream>& stream) {
  Context& context = *stream->context;
  if (context.slot < 0 || stream->closed) return;
  stream->closed = true;
  if (stream->capture) stream->capture->invalidated = true;
  {
    SharedDevice::Guard device(shared_of(context));
    device->destroy_stream(context.slot, stream->place);
  }
  // A busy one stays among the context's streams until done: later work must still be ordered after its work.
  if (stream_idle(*stream)) context.streams.erase(stream.get());
}

CUresult find_stream(CUstream handle, std::shared_ptr<Stream>& stream) {
  if (handle != nullptr && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD) {
    const auto found = driver().streams.find(reinterpret_cast<Stream*>(handle));
    if (found == driver().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
    stream = found->second;
    return context_state(*stream->context);
  }
  std::shared_ptr<Context> context;
  if (const CUresult result = current_context(context); result != CUDA_SUCCESS) return result;
  if (handle != CU_STREAM_PER_THREAD) {
    stream = context->legacy;
    return CUDA_SUCCESS;
  }
  std::shared_ptr<Stream>& own = context->per_thread[thread_id()];
  if (!own) {
    const CUresult result = make_stream(context, StreamKind::kPerThread, 0, 0, own);
    if (result != CUDA_SUCCESS) {
      context->per_thread.erase(thread_id());
      return result;
    }
  }
  stream = own;
  return CUDA_SUCCESS;
}

CUresult find_event(CUevent handle, std::shared_ptr<Event>& event) {
  const auto found = driver().events.find(reinterpret_cast<Event*>(handle));
  if (found == driver().events.end()) return CUDA_ERROR_INVALID_HANDLE;
  event = found->second;
  return context_state(*event->context);
}

CUresult find_function(CUfunction handle, const std::shared_ptr<Context>& context, Function*& function) {
  const auto found = driver().functions.find(reinterpret_cast<Function*>(handle));
  if (found != driver().functions.end()) {
    function = found->second;
    return CUDA_SUCCESS;
  }
  const auto kernel = driver().kernels.find(reinterpret_cast<Kernel*>(handle));
  if (kernel == driver().kernels.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  function = function_of(*kernel->second, context);
  return CUDA_SUCCESS;
}

Function* function_of(Kernel& kernel, const std::shared_ptr<Context>& context) {
  std::unique_ptr<Module>& module = kernel.library->modules[context.get()];
  if (!module) {
    module = std::make_unique<Module>();
    module->context = context;
    for (const auto& spec : kernel.library->specs) {
      auto function = std::make_unique<Function>();
      function->module = module.get();
      function->spec = spec;
      driver().functions.emplace(function.get(), function.get());
      module->functions.push_back(std::move(function));
    }
  }
  return module->functions[kernel.index].get();
}

CUstream per_thread(CUstream stream) { return stream == nullptr ? CU_STREAM_PER_THREAD : stream; }

const Allocation* find_allocation(std::uintptr_t address, std::size_t bytes, std::uintptr_t* base) {
  auto next = driver().allocations.upper_bound(address);
  if (next == driver().allocations.begin()) return nullptr;
  --next;
  const std::size_t offset = address - next->first;
  if (offset >= next->second.bytes) return nullptr;
  std::size_t reach = next->second.bytes;
  for (auto more = std::next(next); next->second.mapped && bytes > reach - offset; ++more) {
    if (more == driver().allocations.end() || !more->second.mapped || more->first != next->first + reach) break;
    reach += more->second.bytes;
  }
  if (bytes > reach - offset) return nullptr;
  if (base != nullptr) *base = next->first;
  return &next->second;
}

bool take_device_memory(const Context& context, std::size_t bytes) {
  if (context.slot < 0) return false;
  SharedDevice& shared = shared_of(context);
  SharedDevice::Guard device(shared);
  return shared.take_memory(device, context.slot, bytes);
}

void give_device_memory_back(const Context& context, std::size_t bytes) {
  if (context.slot < 0) return;  // the memory went with the context
  SharedDevice& shared = shared_of(context);
  SharedDevice::Guard device(shared);
  shared.give_memory_back(device, context.slot, bytes);
}

std::size_t free_device_memory(int ordinal) {
  SharedDevice& shared = driver().gpus[static_cast<std::size_t>(ordinal)]->shared;
  SharedDevice::Guard device(shared);
  return shared.free_memory(device);
}

std::size_t device_memory(int ordinal) {
  return driver().gpus[static_cast<std::size_t>(ordinal)]->shared.memory_bytes();
}

CUresult allocate(const std::shared_ptr<Context>& context, std::size_t bytes, CUmemorytype type, unsigned flags,
                  std::uintptr_t& address) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  Driver& state = driver();
  const bool on_device = type == CU_MEMORYTYPE_DEVICE;
  if (bytes > kLargestBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  if (on_device && !take_device_memory(*context, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* const memory = take_memory(bytes);
  if (memory == nullptr) {
    if (on_device) give_device_memory_back(*context, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  address = reinterpret_cast<std::uintptr_t>(memory);
  state.allocations.emplace(address, Allocation{.bytes = bytes, .type = type, .context = context, .flags = flags});
  return CUDA_SUCCESS;
}

bool release_memory(std::uintptr_t address) {
  Driver& state = driver();
  const auto found = state.allocations.find(address);
  if (found == state.allocations.end()) return false;
  const std::size_t bytes = found->second.bytes;
  if (found->second.mapped) {
    state.allocations.erase(found);  // physical memory has a life of its own
    return true;
  }
  if (found->second.type == CU_MEMORYTYPE_DEVICE) give_device_memory_back(*found->second.context, bytes);
  state.allocations.erase(found);
  give_memory_back(reinterpret_cast<void*>(address), bytes);
  return true;
}

void progress(Lock& lock) {
  Driver& state = driver();
  std::vector<std::pair<Completion, Context*>> taken;
  for (std::size_t ordinal = 0; ordinal < state.gpus.size(); ++ordinal) {
    taken.clear();
    SharedDevice::Guard device(state.gpus[ordinal]->shared);
    for (const auto& [key, context] : state.contexts) {
      if (context->slot < 0 || context->device != static_cast<int>(ordinal)) continue;
      for (Completion done; device->take_completed(context->slot, &done);) taken.emplace_back(done, context.get());
    }
    std::sort(taken.begin(), taken.end(), [](const auto& a, const auto& b) { return a.first.order < b.first.order; });
    for (const auto& [done, key] : taken) {
      Pending& pending = key->pending[static_cast<std::size_t>(Device::op_index(done.ticket))];
      state.completed.push_back({state.contexts.at(key), std::exchange(pending, {}), done});
    }
  }
  if (state.applying) return;
  state.applying = true;
  while (!state.completed.empty()) {
    Applied item = std::move(state.completed.front());
    state.completed.pop_front();
    CUresult result = item.context->sticky;
    if (result == CUDA_SUCCESS && !std::holds_alternative<std::monostate>(item.pending.command)) {
      lock.unlock();
      result = apply(item.pending.command);
      lock.lock();
    }
    if (result != CUDA_SUCCESS) item.context->sticky = result;
    if (item.pending.record) {
      item.pending.record->done = true;
      item.pending.record->finish_ns = item.completion.finish_ns;
    }
    Stream& stream = *item.pending.stream;
    ++stream.applied;
    if (stream.closed && stream_idle(stream)) item.context->streams.erase(&stream);
  }
  state.applying = false;
}

void sleep_until_next_event(Lock& lock, int device) {
  std::int64_t wait_ns = kSleepMaxNs;
  if (driver().completed.empty()) {
    SharedDevice& shared = driver().gpus[static_cast<std::size_t>(device)]->shared;
    SharedDevice::Guard guard(shared);
    const std::int64_t next = guard->next_event_ns();
    if (next != kNever) wait_ns = std::min(wait_ns, shared.to_real_ns(next - shared.simulated_now_ns()));
  }
  lock.unlock();
  const timespec pause{.tv_sec = 0, .tv_nsec = std::max(wait_ns, kSleepMinNs)};
  nanosleep(&pause, nullptr);
  lock.lock();
}

CUresult submit_command(Lock& lock, const std::shared_ptr<Stream>& stream, Command command,
                        std::shared_ptr<Record> record, std::optional<int> priority) {
  lock.unlock();
  const Lock turn(driver().submitting);
  lock.lock();
  make_room(lock, stream->context, default_stream_waits(*stream) + 1);
  if (const CUresult state = context_state(*stream->context); state != CUDA_SUCCESS) return state;
  SharedDevice::Guard device(shared_of(*stream->context));
  if (const CUresult result = order_with_default_stream(device, stream); result != CUDA_SUCCESS) return result;
  const Work work = work_of(command, priority.value_or(stream->priority));
  Ticket ticket = 0;
  return submit_work(device, stream, work, std::move(command), record, &ticket);
}

CUresult submit_wait(Lock& lock, const std::shared_ptr<Stream>& stream, const std::shared_ptr<Record>& record) {
  if (record->done) return CUDA_SUCCESS;
  if (record->context->device != stream->context->device) {
    wait_until(lock, record->context->device, [&] { return record->done; });
    return CUDA_SUCCESS;
  }
  lock.unlock();
  const Lock turn(driver().submitting);
  lock.lock();
  make_room(lock, stream->context, default_stream_waits(*stream) + 1);
  if (const CUresult state = context_state(*stream->context); state != CUDA_SUCCESS) return state;
  SharedDevice::Guard device(shared_of(*stream->context));
  if (const CUresult result = order_with_default_stream(device, stream); result != CUDA_SUCCESS) return result;
  return submit_model_wait(device, stream, record->ticket);
}

namespace {

// Operations of one graph launch, put into the device as there is room. Holds the device's lock in between.
class GraphSubmission {
 public:
  GraphSubmission(Lock& lock, const std::shared_ptr<Context>& context, std::uint64_t op_count)
      : lock_(lock), context_(context), left_(op_count) {}

  // Waits for a completed operation of the same context, which the ticket names.
  CUresult wait(const std::shared_ptr<Stream>& stream, Ticket awaited) {
    if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
    return submit_model_wait(*device_, stream, awaited);
  }

  CUresult work(const std::shared_ptr<Stream>& stream, const Work& work, Command command, Ticket* ticket,
                const std::shared_ptr<Record>& record = nullptr, std::shared_ptr<const void> keeps = nullptr) {
    if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
    return submit_work(*device_, stream, work, std::move(command), record, ticket, std::move(keeps));
  }

  // Until all work of the stream is done, with its effects.
  CUresult settle(const std::shared_ptr<Stream>& stream) {
    auto record = std::make_shared<Record>();
    record->context = context_.get();
    if (const CUresult result = work(stream, {}, {}, &record->ticket, record); result != CUDA_SUCCESS) return result;
    device_.reset();
    room_ = 0;
    wait_until(lock_, context_->device, [&] { return record->done || context_->slot < 0; });
    return context_state(*context_);
  }

  void expect(std::uint64_t op_count) { left_ += op_count; }

  CUresult order_with_default(const std::shared_ptr<Stream>& stream) {
    const std::uint64_t waits = default_stream_waits(*stream);
    left_ += waits;
    if (const CUresult result = enter(waits); result != CUDA_SUCCESS) return result;
    return order_with_default_stream(*device_, stream);
  }

 private:
  static constexpr std::uint64_t kStep = 256;

  // Room for `count` operations more.
  CUresult enter(std::uint64_t count = 1) {
    if (room_ < count || !device_) {
      device_.reset();
      room_ = std::max(count, std::min(left_, room_ == 0 && first_ ? std::uint64_t{kOpsPerContext} : kStep));
      first_ = false;
      make_room(lock_, context_, room_);
      if (const CUresult state = context_state(*context_); state != CUDA_SUCCESS) return state;
      device_.emplace(shared_of(*context_));
    }
    room_ -= count;
    left_ -= std::min(left_, count);
    return CUDA_SUCCESS;
  }

  Lock& lock_;
  const std::shared_ptr<Context>& context_;
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
    SharedDevice::Guard device(shared_of(*context));
    for (const auto& lane : context->lanes) {
      if (lanes.size() == count) break;
      (device->is_complete(lane->last) ? lanes : busy).push_back(lane);
    }
  }
  while (lanes.size() < count && context->lanes.size() < kLanesOfContext) {
    std::shared_ptr<Stream> lane;
    if (make_stream(context, StreamKind::kLane, CU_STREAM_NON_BLOCKING, 0, lane) != CUDA_SUCCESS) break;
    context->lanes.push_back(lane);
    lanes.push_back(std::move(lane));
  }
  for (std::size_t i = 0; lanes.size() < count && i < busy.size(); ++i) lanes.push_back(busy[i]);
  return lanes;
}

// Memory that a launch allocates must have been freed since the launch before, and the reverse.
CUresult check_graph_memory(const Exec& exec) {
  const bool auto_free = (exec.flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) != 0;
  std::unordered_map<const GraphMemory*, bool> live;
  for (std::size_t i = 0; i < exec.states->size(); ++i) {
    const auto* const of = std::get_if<GraphMemoryCommand>(&(*exec.states)[i].command);
    if (of == nullptr) continue;
    const bool allocates = exec.structure->nodes[i].type == CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    const auto [entry, fresh] = live.try_emplace(of->memory.get(), of->memory->live && !(allocates && auto_free));
    if (entry->second == allocates) return CUDA_ERROR_INVALID_VALUE;
    entry->second = allocates;
  }
  return CUDA_SUCCESS;
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

// A conditional node whose dependencies are earlier in the stream.
CUresult submit_conditional(GraphSubmission& submission, const std::shared_ptr<Stream>& stream, const ExecNode& node) {
  CUresult result = submission.settle(stream);
  for (std::size_t chosen = 0; result == CUDA_SUCCESS && decided(node, chosen);) {
    const ExecBody& body = *node.bodies[chosen];
    submission.expect(body.structure->op_count);
    for (std::size_t i = 0; result == CUDA_SUCCESS && i < body.states.size(); ++i) {
      const ExecNode& inner = body.structure->nodes[i];
      const ExecState& state = body.states[i];
      if (inner.type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
        result = submit_conditional(submission, stream, inner);
        continue;
      }
      Ticket ticket = 0;
      const Work work = work_of(state.command, std::clamp(state.priority, kGreatestPriority, 0));
      result = submission.work(stream, work, state.command, &ticket);
    }
    if (result != CUDA_SUCCESS || node.decides != CU_GRAPH_COND_TYPE_WHILE) break;
    result = submission.settle(stream);
  }
  return result;
}

}  // namespace

CUresult submit_exec(Lock& lock, const std::shared_ptr<Stream>& stream, const std::shared_ptr<Exec>& exec) {
  lock.unlock();
  const Lock turn(driver().submitting);
  lock.lock();
  const std::shared_ptr<Context> context = stream->context;
  if (const CUresult state = context_state(*context); state != CUDA_SUCCESS) return state;
  if (!driver().execs.contains(exec.get())) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult result = check_graph_memory(*exec); result != CUDA_SUCCESS) return result;
  if (exec->context != context) {
    exec->last = 0;
    exec->context = context;
  }
  const auto structure = exec->structure;
  const auto states = exec->states;
  const auto holds = exec->holds;
  const std::vector<std::shared_ptr<Stream>> lanes = choose_lanes(stream, structure->lane_count);
  // The conditions at the launch's turn: after the launch before has set them.
  GraphSubmission submission(lock, context, structure->op_count);
  Ticket start = 0;
  CUresult result = submission.order_with_default(stream);
  if (result == CUDA_SUCCESS) result = submission.wait(stream, exec->last);
  if (result == CUDA_SUCCESS && !exec->defaults.empty()) {
    result = submission.settle(stream);
    for (const CUgraphConditionalHandle handle : exec->defaults) {
      Condition& condition = driver().conditions.at(handle);
      condition.value = condition.default_value;
    }
  }
  if (result == CUDA_SUCCESS) result = submission.work(stream, {}, {}, &start);
  std::vector<bool> started(lanes.size(), false);
  std::vector<Ticket> tickets(structure->nodes.size(), 0);
  for (std::size_t i = 0; result == CUDA_SUCCESS && i < structure->nodes.size(); ++i) {
    const ExecNode& node = structure->nodes[i];
    const ExecState& state = (*states)[i];
    const std::size_t lane = node.lane % lanes.size();
    if (lane != 0 && !started[lane]) {
      started[lane] = true;
      result = submission.wait(lanes[lane], start);
    }
    for (const std::size_t dependency : node.dependencies) {
      if (result != CUDA_SUCCESS || structure->nodes[dependency].lane % lanes.size() == lane) continue;
      result = submission.wait(lanes[lane], tickets[dependency]);
    }
    if (result != CUDA_SUCCESS) break;
    std::shared_ptr<Record> record;
    const auto* const event = std::get_if<EventCommand>(&state.command);
    if (event != nullptr && node.type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
      record = std::make_shared<Record>();
      record->context = context.get();
    } else if (event != nullptr && event->event->record && !event->event->record->done) {
      result = submission.wait(lanes[lane], event->event->record->ticket);
      if (result != CUDA_SUCCESS) break;
    }
    if (const auto* const memory = std::get_if<GraphMemoryCommand>(&state.command)) {
      memory->memory->live = node.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    }
    if (node.type == CU_GRAPH_NODE_TYPE_CONDITIONAL) result = submit_conditional(submission, lanes[lane], node);
    if (result != CUDA_SUCCESS) break;
    Command command = state.enabled ? state.command : Command{};
    const Work work = work_of(command, std::clamp(state.priority, kGreatestPriority, 0));
    result = submission.work(lanes[lane], work, std::move(command), &tickets[i], record);
    if (result == CUDA_SUCCESS && record) event->event->record = std::move(record);
  }
  for (std::size_t lane = 1; result == CUDA_SUCCESS && lane < lanes.size(); ++lane) {
    if (started[lane]) result = submission.wait(stream, lanes[lane]->last);
  }
  Ticket end = 0;
  if (result == CUDA_SUCCESS) result = submission.work(stream, {}, {}, &end, nullptr, holds);
  if (result == CUDA_SUCCESS) exec->last = end;
  return result;
}

void run_destructors() {
  Driver& state = driver();
  if (!state.destructors_due.load(std::memory_order_acquire)) return;
  std::vector<HostCommand> due;
  {
    const Lock lock(state.mutex);
    due.swap(state.destructors);
    state.destructors_due.store(false, std::memory_order_relaxed);
  }
  for (const HostCommand& destructor : due) call_host(destructor.function, destructor.data);
}

CUresult synchronize_stream(Lock& lock, const std::shared_ptr<Stream>& stream) {
  const std::shared_ptr<Context> context = stream->context;
  std::vector<std::pair<std::shared_ptr<Stream>, std::uint64_t>> targets;
  for (const auto& [key, other] : context->streams) {
    const bool wanted = other == stream || (stream->kind == StreamKind::kLegacy && other->blocking());
    if (wanted && !stream_idle(*other)) targets.emplace_back(other, other->submitted);
  }
  wait_until(lock, context->device, [&] {
    std::erase_if(targets, [](const auto& target) { return target.first->applied >= target.second; });
    return targets.empty() || context->slot < 0;
  });
  return context_state(*context);
}

CUresult synchronize_context(Lock& lock, const std::shared_ptr<Context>& context) {
  std::vector<std::pair<std::shared_ptr<Stream>, std::uint64_t>> targets;
  for (const auto& [key, stream] : context->streams) {
    if (!stream_idle(*stream)) targets.emplace_back(stream, stream->submitted);
  }
  wait_until(lock, context->device, [&] {
    std::erase_if(targets, [](const auto& target) { return target.first->applied >= target.second; });
    return targets.empty() || context->slot < 0;
  });
  return context_state(*context);
}

bool stream_idle(const Stream& stream) { return stream.applied == stream.submitted; }

}  // namespace cudasched::simulated_driver
