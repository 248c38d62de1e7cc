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

SharedDevice& shared_of(const Context& context) { return gpu(context.device).shared; }

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

SimulatedGpu& gpu(CUdevice device) {
  require(device >= 0 && static_cast<std::size_t>(device) < driver().gpus.size(), CUDA_ERROR_INVALID_DEVICE);
  return *driver().gpus[static_cast<std::size_t>(device)];
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

std::shared_ptr<Context> current_context() {
  const std::vector<Context*>& stack = context_stack();
  require(!stack.empty() && stack.back() != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  std::shared_ptr<Context> context = find(driver().contexts, stack.back(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  require_sound(*context);
  return context;
}

void require_sound(const Context& context) {
  require(context.slot >= 0, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  require(context.sticky == CUDA_SUCCESS, context.sticky);
}

const Green* current_green() {
  const std::vector<Context*>& stack = context_stack();
  if (stack.empty()) return nullptr;
  const auto found = driver().greens.find(reinterpret_cast<Green*>(stack.back()));
  return found == driver().greens.end() ? nullptr : found->second.get();
}

void activate_context(Context& context) {
  SharedDevice& shared = shared_of(context);
  {
    SharedDevice::Guard device(shared);
    const Status status = shared.create_context(device, &context.slot);
    if (status != Status::kOk) {
      context.slot = -1;
      throw Refused(status == Status::kFull ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM);
    }
  }
  make_channel_groups(context);
  context.sticky = CUDA_SUCCESS;
  context.pending.assign(kOpsPerContext, {});
  context.legacy = make_stream(driver().contexts.at(&context), StreamKind::kLegacy, 0, 0);
  require(context.legacy != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
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
    drop_functions(*entry.second);
    return true;
  });
  for (const auto& [key, library] : state.libraries) {
    const auto module = library->modules.find(context.get());
    if (module == library->modules.end()) continue;
    drop_functions(*module->second);
    library->modules.erase(module);
  }
  for (auto& [handle, memory] : state.physical) {
    if (ours(memory.context)) memory.counts = false;
  }
  for (const auto& [key, exec] : state.execs) {
    if (ours(exec->memory_of)) exec->memory_of = nullptr;
    if (!ours(exec->context)) continue;
    exec->context = nullptr;
    exec->last = 0;
  }
  std::vector<std::uintptr_t> addresses;
  for (const auto& [address, allocation] : state.allocations) {
    if (ours(allocation.context)) addresses.push_back(address);
  }
  for (const std::uintptr_t address : addresses) release_memory(address);
  free_channel_groups(*context);
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

std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context>& context, StreamKind kind, unsigned flags,
                                    int priority) {
  int place = 0;
  {
    SharedDevice::Guard device(shared_of(*context));
    if (device->create_stream(context->slot, &place) != Status::kOk) return nullptr;
  }
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  stream->kind = kind;
  stream->place = place;
  stream->flags = flags;
  stream->priority = std::clamp(priority, kGreatestPriority, 0);
  stream->green = current_green();
  stream->id = driver().next_id++;
  context->streams.emplace(stream.get(), stream);
  return stream;
}

CUstream open_stream(const std::shared_ptr<Context>& context, unsigned flags, int priority, const Green* green) {
  const std::shared_ptr<Stream> stream = make_stream(context, StreamKind::kOrdinary, flags, priority);
  require(stream != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
  stream->green = green;
  driver().streams.emplace(stream.get(), stream);
  return reinterpret_cast<CUstream>(stream.get());
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

std::shared_ptr<Stream> find_stream(CUstream handle) {
  if (handle != nullptr && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD) {
    std::shared_ptr<Stream> stream = find(driver().streams, handle);
    require_sound(*stream->context);
    return stream;
  }
  const std::shared_ptr<Context> context = current_context();
  if (handle != CU_STREAM_PER_THREAD) return context->legacy;
  if (const auto own = context->per_thread.find(thread_id()); own != context->per_thread.end()) return own->second;
  std::shared_ptr<Stream> made = make_stream(context, StreamKind::kPerThread, 0, 0);
  require(made != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
  context->per_thread.emplace(thread_id(), made);
  return made;
}

std::shared_ptr<Event> find_event(CUevent handle) {
  std::shared_ptr<Event> event = find(driver().events, handle);
  require_sound(*event->context);
  return event;
}

Function& find_function(CUfunction handle, const std::shared_ptr<Context>& context) {
  const auto found = driver().functions.find(reinterpret_cast<Function*>(handle));
  if (found != driver().functions.end()) return *found->second;
  Kernel& kernel = *find(driver().kernels, handle);
  require(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  return function_of(kernel, context);
}

Function& function_of(Kernel& kernel, const std::shared_ptr<Context>& context) {
  std::unique_ptr<Module>& module = kernel.library->modules[context.get()];
  if (!module) module = make_module(context, kernel.library->specs);
  return *module->functions[kernel.index];
}

std::unique_ptr<Module> make_module(const std::shared_ptr<Context>& context,
                                    const std::vector<std::shared_ptr<const KernelSpec>>& specs) {
  auto module = std::make_unique<Module>();
  module->context = context;
  for (const auto& spec : specs) {
    auto function = std::make_unique<Function>();
    function->module = module.get();
    function->spec = spec;
    driver().functions.emplace(function.get(), function.get());
    module->functions.push_back(std::move(function));
  }
  return module;
}

void drop_functions(const Module& module) {
  for (const auto& function : module.functions) driver().functions.erase(function.get());
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

void take_device_memory(const Context& context, std::size_t bytes) {
  SharedDevice& shared = shared_of(context);
  SharedDevice::Guard device(shared);
  require(context.slot >= 0 && shared.take_memory(device, context.slot, bytes), CUDA_ERROR_OUT_OF_MEMORY);
}

void give_device_memory_back(const Context& context, std::size_t bytes) {
  if (context.slot < 0) return;  // the memory went with the context
  SharedDevice& shared = shared_of(context);
  SharedDevice::Guard device(shared);
  shared.give_memory_back(device, context.slot, bytes);
}

std::size_t free_device_memory(int ordinal) {
  SharedDevice& shared = gpu(ordinal).shared;
  SharedDevice::Guard device(shared);
  return shared.free_memory(device);
}

std::uintptr_t allocate(const std::shared_ptr<Context>& context, std::size_t bytes, CUmemorytype type, unsigned flags) {
  require(bytes != 0);
  require(bytes <= kLargestBytes, CUDA_ERROR_OUT_OF_MEMORY);
  const bool on_device = type == CU_MEMORYTYPE_DEVICE;
  if (on_device) take_device_memory(*context, bytes);
  void* const memory = take_memory(bytes);
  if (memory == nullptr) {
    if (on_device) give_device_memory_back(*context, bytes);
    throw Refused(CUDA_ERROR_OUT_OF_MEMORY);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  driver().allocations.emplace(address, Allocation{.bytes = bytes, .type = type, .context = context, .flags = flags});
  return address;
}

void release_memory(std::uintptr_t address) {
  const auto found = driver().allocations.find(address);
  if (found == driver().allocations.end()) return;
  const Allocation released = found->second;
  driver().allocations.erase(found);
  if (released.mapped) return;  // physical memory has a life of its own
  if (released.type == CU_MEMORYTYPE_DEVICE) give_device_memory_back(*released.context, released.bytes);
  give_memory_back(reinterpret_cast<void*>(address), released.bytes);
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
    SharedDevice& shared = gpu(device).shared;
    SharedDevice::Guard guard(shared);
    const std::int64_t next = guard->next_event_ns();
    if (next != kNever) wait_ns = std::min(wait_ns, shared.to_real_ns(next - shared.simulated_now_ns()));
  }
  lock.unlock();
  const timespec pause{.tv_sec = 0, .tv_nsec = std::max(wait_ns, kSleepMinNs)};
  nanosleep(&pause, nullptr);
  lock.lock();
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

namespace {

// Until the work that these streams have now is done, or their context is gone.
template <class Wanted>
void wait_for(Lock& lock, const Context& context, Wanted wanted) {
  std::vector<std::pair<std::shared_ptr<Stream>, std::uint64_t>> targets;
  for (const auto& [key, stream] : context.streams) {
    if (!stream_idle(*stream) && wanted(*stream)) targets.emplace_back(stream, stream->submitted);
  }
  wait_until(lock, context.device, [&] {
    std::erase_if(targets, [](const auto& target) { return target.first->applied >= target.second; });
    return targets.empty() || context.slot < 0;
  });
}

}  // namespace

void synchronize_stream(Lock& lock, const std::shared_ptr<Stream>& stream) {
  const std::shared_ptr<Context> context = stream->context;
  wait_for(lock, *context, [&](const Stream& other) {
    return &other == stream.get() || (stream->kind == StreamKind::kLegacy && other.blocking());
  });
  require_sound(*context);
}

void synchronize_context(Lock& lock, const std::shared_ptr<Context>& context) {
  settle(lock, *context);
  require_sound(*context);
}

void settle(Lock& lock, const Context& context) {
  wait_for(lock, context, [](const Stream&) { return true; });
}

bool stream_idle(const Stream& stream) { return stream.applied == stream.submitted; }

}  // namespace cudasched::simulated_driver
