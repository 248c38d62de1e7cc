#include "runtime/engine.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "driver/registry.hpp"
#include "runtime/collecting.hpp"
#include "runtime/engine_policy.hpp"
#include "runtime/partitions.hpp"
#include "runtime/predictor_files.hpp"
#include "telemetry/collector.hpp"
#include "telemetry/coverage.hpp"

namespace cudasched::runtime {
namespace {

constexpr std::int64_t kActiveTickNs = kNsPerMs;     // while a latency client of this process is active
constexpr std::int64_t kBusyTickNs = 5 * kNsPerMs;   // while it launches
constexpr std::int64_t kIdleTickNs = 20 * kNsPerMs;  // else; a heartbeat must not grow stale
constexpr int kIdleTicks = 15;                       // so often; where nothing is scheduled, not once
constexpr std::int64_t kPolicyHangsNs = kNsPerSecond;
constexpr std::int64_t kQuietTickNs = kNsPerSecond;  // then, while nothing begins: for what `status` shows

// Where a thread's regions are, from its first one to its end. A thread that ends leaves those that are open.
class ThreadRegions {
 public:
  ~ThreadRegions() {
    engine().leave_all_regions();
    this_thread().stack = nullptr;
  }
  RegionStack* get() noexcept { return stack_.get(); }

 private:
  std::unique_ptr<RegionStack> stack_ = std::make_unique<RegionStack>();
};

RegionStack* region_stack() {
  static thread_local ThreadRegions regions;
  return regions.get();
}

// For the exit handler: whoever holds the lock may be what the exit interrupted.
bool lock_briefly(std::mutex& mutex) noexcept {
  for (int tries = 0; tries < 200; ++tries) {
    if (mutex.try_lock()) return true;
    const timespec time{0, kNsPerMs};
    nanosleep(&time, nullptr);
  }
  return false;
}

// A tool such as compute-sanitizer or Nsight is in the process: it attributes calls to the threads that make them, and
// holds some of them for as long as it likes.
bool a_tool_is_injected() noexcept {
  if (std::getenv("CUDA_INJECTION64_PATH") != nullptr || std::getenv("NV_SANITIZER_INJECTION_PORT_BASE") != nullptr) {
    return true;
  }
  return dlopen("libsanitizer-collection.so", RTLD_NOW | RTLD_NOLOAD) != nullptr;
}

}  // namespace

Engine& engine() noexcept {
  // Never destroyed: other threads may still launch while the process exits.
  alignas(Engine) static unsigned char storage[sizeof(Engine)];
  static Engine* const instance = new (storage) Engine();
  return *instance;
}

Device::Device(CUdevice handle, int ordinal, const Settings& settings) : handle_(handle), ordinal_(ordinal) {
  const std::string directory = settings.run_directory.empty() ? arbiter::default_directory() : settings.run_directory;
  table_ = arbiter::Table::open(directory, driver::device_uuid(handle), driver::device_name(handle));
}

void Device::prepare_predictor(const Settings& settings, const predict::Allocations* allocations) noexcept {
  std::call_once(predictor_prepared_, [&] {
    const auto or_without = [](auto&& attempt) {
      try {
        attempt();
      } catch (const std::exception& error) {
        log::warning(std::string(error.what()) + "; going on without");
      }
    };
    or_without([&] {
      trees_ = load_trees(settings, driver::device_attribute(handle_, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                          driver::device_attribute(handle_, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    });
    gate.use(trees_.get(), allocations);
    or_without([&] {
      state_path_ = state_path(settings, driver::device_uuid(handle_));
      if (state_path_.empty()) return;
      const std::vector<std::byte> state = read_state(state_path_);
      if (!state.empty()) gate.restore(state);
    });
  });
}

void Device::save_predictor() noexcept {
  if (state_path_.empty() || !registered(Class::kBestEffort)) return;
  try {
    const std::vector<std::byte> state = gate.save();
    if (!state.empty()) write_state(state_path_, state);
  } catch (const std::exception& error) {
    log::info(error.what());  // a read-only home is no fault
  }
}

void Device::start_queue(const queue::Calls& calls, void (*started)(queue::Queue&) noexcept) noexcept {
  if (owned_queue_ != nullptr) return;
  try {
    owned_queue_ = std::make_unique<queue::Queue>(calls, admission_, &holds_gil);
    owned_queue_->serve(ordinal_);
  } catch (const std::bad_alloc&) {
    log::warning("no memory for a launch queue: best-effort launches wait on the program's own threads");
    return;
  }
  if (!owned_queue_->start()) {
    log::warning("the launch queue did not start: best-effort launches wait on the program's own threads");
    return;
  }
  started(*owned_queue_);
  queue_.store(owned_queue_.get(), std::memory_order_release);
}

arbiter::Condition Device::tend(std::int64_t now, bool at_once) noexcept {
  const std::scoped_lock lock(tend_);
  const arbiter::Condition found = table_->tend(now, at_once);
  if (found == arbiter::Condition::kSound) return std::exchange(untold_, found);
  if (found != arbiter::Condition::kMoved) return found;
  for (auto& place : slots_) {
    if (const int slot = place.load(); slot >= 0) place.store(table_->slot_now(slot), std::memory_order_release);
  }
  if (const int slot = this->slot(Class::kBestEffort); slot >= 0) {
    latency.note_own_best_effort(slot);
    gate.moved(slot);
  }
  if (const int slot = this->slot(Class::kLatency); slot >= 0) latency.moved(slot);
  return found;
}

void Device::register_client(Class client_class, const Settings& settings, const Graphs* graphs, std::uint64_t job) {
  if (registered(client_class)) return;
  if (const arbiter::Condition found = tend(now_ns(), /*at_once=*/true); found != arbiter::Condition::kSound) {
    const std::scoped_lock lock(tend_);
    untold_ = found;
  }
  arbiter::ClientInfo client;
  client.client_class = client_class;
  client.priority = settings.priority;
  client.slo_ns = settings.slo_ns;
  client.name = settings.name.empty() ? program_name() : settings.name;
  if (client_class == Class::kBestEffort) client.job = job;
  const int slot = table_->claim(client);
  if (client_class == Class::kLatency) {
    latency.register_client(table_.get(), slot, settings, driver::under_mps(handle_));
  }
  if (client_class == Class::kBestEffort) {
    latency.note_own_best_effort(slot);
    if (job != 0) {
      peers.join(job, *table_);
      peers.refresh(now_ns());
      gate.use_peers(&peers);
    }
    gate.register_client(table_.get(), slot, settings, &latency, graphs, handle_);
  }
  slots_[static_cast<std::size_t>(client_class)].store(slot, std::memory_order_release);
}

void Engine::attach(void* real_driver, const std::string& path) {
  const std::scoped_lock lock(mutex_);
  driver::table().load(real_driver);
  driver_path_ = path;
  std::vector<std::string> complaints;
  const Settings chosen = settings_;
  settings_ = Settings::read([](const char* name) -> const char* { return std::getenv(name); }, complaints);
  if (class_was_set_) {
    settings_.process_class = chosen.process_class;
    settings_.priority = chosen.priority;
    settings_.slo_ns = chosen.slo_ns;
  }
  for (const auto& [variable, value] : configured_) settings_.set(variable, value);
  for (const std::string& complaint : complaints) log::warning(complaint);
  hot().host_backoff.configure(settings_.host_backoff_limit_ns());
  hot().process_class.store(settings_.process_class, std::memory_order_relaxed);
  if (!handlers_registered_) {
    handlers_registered_ = true;
    pthread_atfork(
        [] {
          engine().mutex_.lock();
          LatencyActivity::probe_mutex().lock();
        },
        [] {
          LatencyActivity::probe_mutex().unlock();
          engine().mutex_.unlock();
        },
        [] {
          engine().reset_in_child();
          LatencyActivity::probe_mutex().unlock();
          engine().mutex_.unlock();
        });
  }
  if (allocations_ == nullptr) allocations_ = std::make_unique<predict::Allocations>();
  attached_.store(true, std::memory_order_release);
  log::info("hooked the driver at " + path);
}

void Engine::start() noexcept {
  // Takes the dynamic loader's lock, which another thread may hold while its library's constructor waits for mutex_.
  find_gil_check();
  try {
    const std::scoped_lock lock(mutex_);
    if (started_ || stopping_ || !off_reason_.empty()) return;
    started_ = true;
    auto& driver = driver::table();
    if (driver.driver_get_version(&driver_version_) != CUDA_SUCCESS) driver_version_ = 0;
    if (driver_version_ < kLeastDriverVersion) {
      off_reason_ = "the NVIDIA driver at " + driver_path_ + " supports CUDA " +
                    std::to_string(driver_version_ / 1000) + "." + std::to_string(driver_version_ % 1000 / 10) +
                    "; scheduling needs 12.4 (release 550) or later: every launch passes through unscheduled";
      log::warning(off_reason_);
      return;
    }
    if (driver.device_get_count(&device_count_) != CUDA_SUCCESS || device_count_ < 1) return;
    // Registered after the driver's own handler, so that it runs before it.
    static const bool at_exit = std::atexit([] { engine().stop(); }) == 0;
    (void)at_exit;
    if (!settings_.coverage_directory.empty()) {
      try {
        telemetry::start_coverage(settings_.cupti_path);
      } catch (const std::exception& error) {
        coverage_error_ = error.what();
        log::warning(coverage_error_);
      }
    }
    hot().scheduling.store(true, std::memory_order_release);
    collect_if_asked(settings_.cupti_path);
    if (device_count_ == 1) {
      CUdevice only = 0;
      if (driver.device_get(&only, 0) == CUDA_SUCCESS) {
        auto device = std::make_unique<Device>(only, 0, settings_);
        hot().only_device.store(device.get(), std::memory_order_release);
        devices_[0].store(device.release(), std::memory_order_release);
      }
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

void Engine::decline(const std::string& why) {
  const std::scoped_lock lock(mutex_);
  off_reason_ = why;
  log::warning(why);
}

void Engine::fail(const std::string& why) noexcept {
  if (!hot().scheduling.exchange(false)) return;
  for_each_device([](Device& device) {
    if (device.queue() != nullptr) device.queue()->fail();
  });
  for_each_device([](Device& device) {
    if (device.registered(Class::kLatency)) device.table().clear_active(device.slot(Class::kLatency));
    device.table().wake_all();
  });
  try {
    const std::string message = "scheduling is off for this process: " + why;
    log::error(message);
    const std::scoped_lock lock(mutex_);
    off_reason_ = why;
  } catch (const std::exception&) {
    log::error("scheduling is off for this process: out of memory");
  }
}

Device* Engine::find_device(ThreadState& thread) noexcept {
  CUcontext context = nullptr;
  if (driver::table().context_get_current(&context) != CUDA_SUCCESS || context == nullptr) return nullptr;
  const std::uint64_t epoch = hot().context_epoch.load(std::memory_order_acquire);
  if (thread.context == context && thread.context_epoch == epoch) return thread.device;
  CUdevice handle = 0;
  if (driver::table().context_get_device(&handle) != CUDA_SUCCESS) return nullptr;
  thread.device = device_by_ordinal(handle);
  thread.context = context;
  thread.context_epoch = epoch;
  return thread.device;
}

Device* Engine::device_by_ordinal(CUdevice handle) noexcept {
  // A CUdevice is the device's ordinal; MIG instances come as devices of their own.
  if (handle < 0 || handle >= kMaxDevices) return nullptr;
  auto& place = devices_[static_cast<std::size_t>(handle)];
  if (Device* known = place.load(std::memory_order_acquire)) return known;
  try {
    const std::scoped_lock lock(mutex_);
    if (Device* known = place.load(std::memory_order_acquire)) return known;
    auto device = std::make_unique<Device>(handle, handle, settings_);
    place.store(device.get(), std::memory_order_release);
    return device.release();
  } catch (const std::exception& error) {
    fail(error.what());
    return nullptr;
  }
}

bool Engine::prepare(Device& device, Class launch_class, ThreadState& thread) noexcept {
  try {
    name_thread(thread);
    if (!device.registered(launch_class)) {
      const std::scoped_lock lock(mutex_);
      if (stopping_) return false;
      if (launch_class == Class::kBestEffort) device.prepare_predictor(settings_, allocations_.get());
      if (launch_class == Class::kBestEffort && !job_) job_ = job_id(settings_.job, device_count_);
      device.register_client(launch_class, settings_, &graphs_, job_.value_or(0));
      if (launch_class == Class::kBestEffort && user_policy_) {
        device.gate.use_policy(schedule::Decider(*user_policy_));
      }
      if (launch_class == Class::kBestEffort && wants_offload()) {
        device.start_queue(*offload_.calls, offload_.started);
      }
      // From now on what waits behind the gate may be what latency work waits for.
      bool latency = false;
      for_each_device([&](Device& each) { latency = latency || each.registered(Class::kLatency); });
      for_each_device([&](Device& each) {
        if (latency && each.queue() != nullptr) each.queue()->latency_came();
      });
      start_ticker();
      log::info("registered as a " + std::string(class_name(launch_class)) + " client in " + device.table().path());
    }
    if (launch_class == Class::kLatency && thread.depth > 0) {
      Region& region = thread.innermost();
      const std::uint32_t bit = 1U << device.ordinal();
      if (region.region_class == Class::kLatency && (region.devices & bit) == 0) {
        region.devices |= bit;
        device.latency.enter_region(region);
      }
    }
    return true;
  } catch (const std::exception& error) {
    fail(error.what());
    return false;
  }
}

bool Engine::wants_offload() const noexcept {
  if (!settings_.offload || offload_.calls == nullptr || a_tool_is_injected()) return false;
  // Every launch is to be over when its call returns.
  const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  return blocking == nullptr || std::strcmp(blocking, "1") != 0;
}

void Engine::set_process_class(Class value, std::int32_t priority, std::int64_t slo_ns) {
  const std::scoped_lock lock(mutex_);
  class_was_set_ = true;
  settings_.process_class = value;
  settings_.priority = priority;
  settings_.slo_ns = slo_ns;
  hot().process_class.store(value, std::memory_order_relaxed);
  for_each_device([&](Device& device) {
    const int slot = device.slot(value);
    if (slot < 0 || device.table().lost()) return;
    if (value == Class::kLatency) device.latency.set_priority(priority);
    device.table().set_priority(slot, priority);
    device.table().set_slo(slot, slo_ns);
  });
}

std::uint64_t Engine::enter_region(Class value, std::int32_t priority, std::int64_t slo_ns, std::int64_t deadline_ns) {
  ThreadState& thread = this_thread();
  if (thread.depth == RegionStack::kCapacity) {
    throw Error("regions are nested more than " + std::to_string(RegionStack::kCapacity) +
                " deep on this thread; leave some before entering another");
  }
  thread.stack = region_stack();
  ++thread.depth;
  Region& region = thread.innermost();
  region = {};
  region.region_class = value;
  region.priority = priority;
  region.slo_ns = slo_ns;
  region.deadline_ns = deadline_ns;
  region.token = next_token_.fetch_add(1, std::memory_order_relaxed);
  if (value == Class::kLatency) hot().host_backoff.enter();
  if (value == Class::kBestEffort) {
    hot().marks.entered(region.token);
    hot().carries_origins.store(true, std::memory_order_relaxed);
  }
  // The earliest hint there is: best-effort work holds back before the first launch. On a machine with several GPUs the
  // thread's context says which one; without a context the first launch does.
  if (value == Class::kLatency && hot().scheduling.load(std::memory_order_relaxed)) {
    if (Device* device = current_device(thread)) prepare(*device, value, thread);
  }
  return region.token;
}

void Engine::exit_region(std::uint64_t token) {
  ThreadState& thread = this_thread();
  for (int i = thread.depth - 1; i >= 0; --i) {
    auto& regions = thread.stack->regions;
    const Region region = regions[static_cast<std::size_t>(i)];
    if (region.token != token) continue;
    std::move(regions.begin() + i + 1, regions.begin() + thread.depth, regions.begin() + i);
    --thread.depth;
    leave_devices(region);
    return;
  }
  throw Error(
      "this region was not entered on this thread, or was left already; a region belongs to the thread that "
      "entered it");
}

void Engine::leave_devices(const Region& region) noexcept {
  if (region.region_class == Class::kLatency) hot().host_backoff.leave();
  if (region.region_class == Class::kBestEffort) {
    hot().marks.left(region.token);
    if (hot().marks.in_use()) hot().ticker.wake();
  }
  for_each_device([&](Device& device) {
    if ((region.devices & (1U << device.ordinal())) != 0) device.latency.exit_region(region);
  });
}

// ---- marks of streams

void Engine::note_stream_use(CUstream stream, ThreadState& thread) noexcept {
  Hot& state = hot();
  if (!state.scheduling.load(std::memory_order_relaxed) || is_captured(stream)) return;
  const Class region = thread.depth > 0 ? thread.innermost().region_class : Class::kNormal;
  name_thread(thread);
  if (region == Class::kBestEffort) {
    // In a program that is best effort as a whole, every thread is without a mark.
    if (state.process_class.load(std::memory_order_relaxed) == Class::kBestEffort) return;
    const std::uint64_t stamp = thread.innermost().token + (state.marks.epoch() << 48);
    // A default stream is another one in another context.
    if (thread.marked_stream == stream && thread.marked_stamp == stamp && stream != CU_STREAM_LEGACY) return;
    CUcontext context = nullptr;
    if (driver::table().context_get_current(&context) != CUDA_SUCCESS) return;
    state.marks.mark(StreamMarks::key(stream, context), stream, context, thread.innermost().token);
    thread.marked_stream = stream;
    thread.marked_stamp = stamp;
    return;
  }
  if (!state.marks.in_use()) return;
  telemetry::Shard& count = state.counters.shard(thread.index);
  const std::uint64_t key = mark_key(stream);
  if (region == Class::kLatency) {
    if (state.marks.contest(key)) count.contested_streams.fetch_add(1, std::memory_order_relaxed);
  } else if (classify(stream, thread) == Class::kNormal && state.marks.marked(key)) {
    count.normal_beside_best_effort.fetch_add(1, std::memory_order_relaxed);
  }
}

void Engine::note_record(CUevent event, CUstream stream) noexcept {
  Hot& state = hot();
  const ThreadState& thread = this_thread();
  Class bound = Class::kNormal;
  Origin origin = kNoOrigin;
  if (!state.streams.empty() && state.streams.find(reinterpret_cast<std::uintptr_t>(stream), bound)) {
    origin = bound == Class::kBestEffort ? kBoundOrigin : kNoOrigin;
  } else if (thread.depth > 0) {
    const Region& region = thread.innermost();
    origin = region.region_class == Class::kBestEffort ? region.token : kNoOrigin;
  } else if (state.marks.in_use()) {
    origin = state.marks.find(mark_key(stream));
  }
  state.event_origins.set(event, origin);
}

void Engine::note_wait(CUevent event, CUstream stream) noexcept {
  Hot& state = hot();
  // What a region does it does in its own class, and what is bound stays so.
  if (this_thread().depth > 0 || state.process_class.load(std::memory_order_relaxed) == Class::kBestEffort) return;
  Class bound = Class::kNormal;
  if (!state.streams.empty() && state.streams.find(reinterpret_cast<std::uintptr_t>(stream), bound)) return;
  const Origin origin = state.event_origins.find(event);
  if (origin == kNoOrigin && !state.marks.in_use()) return;
  CUcontext context = nullptr;
  if (is_captured(stream) || driver::table().context_get_current(&context) != CUDA_SUCCESS) return;
  state.marks.inherit(StreamMarks::key(stream, context), stream, context, origin);
}

void Engine::forget_stream(CUstream stream) noexcept {
  for_each_device([&](Device& device) { device.latency.forget_stream(stream); });
  if (!hot().streams.empty()) unbind_stream(reinterpret_cast<std::uintptr_t>(stream));
  const std::scoped_lock lock(LatencyActivity::probe_mutex());  // no sweep asks the driver for it meanwhile
  hot().marks.forget(StreamMarks::key(stream, nullptr));
}

void Engine::forget_streams_of(CUcontext context) noexcept {
  const std::scoped_lock lock(LatencyActivity::probe_mutex());
  hot().marks.forget_context(context);
  hot().event_origins.clear();
}

void Engine::sweep_marks() noexcept {
  if (!hot().marks.in_use()) return;
  const std::scoped_lock lock(LatencyActivity::probe_mutex());
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  const driver::RelaxedCapture relaxed;
  hot().marks.sweep([&](CUstream stream, CUcontext context) {
    bool queued = false;
    for_each_device([&](Device& device) {
      queued = queued || (device.queue() != nullptr && device.queue()->before(queue::Scope::kStream, stream) != 0);
    });
    if (queued) return false;
    const driver::CurrentContext current(context);
    if (!current.ok()) return true;
    if (hot().captures.load(std::memory_order_relaxed) > 0) {
      // Asking for the legacy stream while some stream is captured would invalidate the capture.
      if (stream == CU_STREAM_LEGACY || is_captured(stream)) return false;
    }
    return driver::table().stream_query.legacy(stream) != CUDA_ERROR_NOT_READY;
  });
}

void Engine::leave_all_regions() noexcept {
  for (ThreadState& thread = this_thread(); thread.depth > 0; --thread.depth) leave_devices(thread.innermost());
}

void Engine::note_graph(CUgraphExec exec, CUgraph graph) noexcept {
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  Device* const device = current_device(this_thread());
  if (device == nullptr) return;
  device->prepare_predictor(settings_, allocations_.get());
  graphs_.note(exec, graph, [&](const predict::Query& query) { return device->gate.estimate_ns(query); });
}

void Engine::expect(std::int64_t within_ns) {
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  ThreadState& thread = this_thread();
  Device* const device = current_device(thread);
  if (device == nullptr || !prepare(*device, Class::kLatency, thread)) return;
  device->latency.expect(within_ns);
}

void Engine::configure(const std::string& name, const std::string& value) {
  // What the engine looks at anew after it has begun.
  static constexpr std::string_view kAtAnyTime[] = {
      "CUDASCHED_POLICY",    "CUDASCHED_LEAD_US",   "CUDASCHED_MAX_INFLATION",  "CUDASCHED_LONG_US",
      "CUDASCHED_LINGER_US", "CUDASCHED_MARGIN_US", "CUDASCHED_HOST_BACKOFF_MS"};
  std::string variable = "CUDASCHED_" + (name == "client_class" ? "class" : name);
  for (char& c : variable) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  if (variable == "CUDASCHED_LOG") return log::set_level(value);

  const std::scoped_lock lock(mutex_);
  Settings().set(variable, value);  // is there such a setting, and has the value a meaning?
  const bool at_any_time = std::find(std::begin(kAtAnyTime), std::end(kAtAnyTime), variable) != std::end(kAtAnyTime);
  if (attached() && !at_any_time) {
    throw ConfigError(name + " is decided by the program's first CUDA call, which has been made; set it before");
  }
  if (!attached()) configured_.emplace_back(variable, value);
  settings_.set(variable, value);  // and nothing else: the rest is read without the lock
  hot().host_backoff.configure(settings_.host_backoff_limit_ns());
  if (variable == "CUDASCHED_HOST_BACKOFF_MS") return;
  const schedule::Policy* const policy = variable == "CUDASCHED_POLICY" ? schedule::find_policy(value) : nullptr;
  if (policy != nullptr) user_policy_.reset();
  for_each_device([&](Device& device) {
    if (!device.gate.registered()) return;
    if (policy != nullptr) {
      device.gate.use_policy(schedule::Decider(*policy));
    } else {
      device.gate.configure(settings_);
    }
  });
}

void Engine::use_policy(schedule::UserPolicy policy) {
  const std::scoped_lock lock(mutex_);
  user_policy_ = policy;
  policy_refused_ = false;
  for_each_device([&](Device& device) {
    if (device.gate.registered()) device.gate.use_policy(schedule::Decider(policy));
  });
}

void Engine::bind_stream(std::uint64_t stream, Class value) {
  const std::scoped_lock lock(mutex_);
  if (stream == 0) throw Error("the default stream cannot have a class of its own; use a region or another stream");
  if (value == Class::kBestEffort) hot().carries_origins.store(true, std::memory_order_relaxed);
  if (!hot().streams.bind(stream, value)) {
    throw Error("more than " + std::to_string(StreamClasses::kCapacity) + " streams have a class; unbind some first");
  }
  hot().marks.bound(true);
}

void Engine::unbind_stream(std::uint64_t stream) noexcept {
  const std::scoped_lock lock(mutex_);
  hot().streams.unbind(stream);
  hot().marks.bound(!hot().streams.empty());
}

void Engine::start_coverage(const std::string& cupti_path) {
  {
    const std::scoped_lock lock(mutex_);
    if (!started_) throw HookError("coverage needs the hook and an initialised driver: make a CUDA call first");
  }
  telemetry::start_coverage(cupti_path);
}

StateReport Engine::report() {
  const std::scoped_lock lock(mutex_);
  StateReport report;
  report.attached = attached();
  report.scheduling = hot().scheduling.load();
  report.process_class = hot().process_class.load();
  report.driver_version = driver_version_;
  report.totals = hot().counters.totals();
  report.device_launches = telemetry::device_launches();
  for_each_device([&](const Device& device) {
    if (device.queue() == nullptr) return;
    const queue::LauncherTime time = device.queue()->launcher_time();
    report.launcher.cpu_ns += time.cpu_ns;
    report.launcher.driver_ns += time.driver_ns;
  });
  report.off_reason = off_reason_;
  report.driver_path = driver_path_;
  return report;
}

void Engine::start_ticker() {
  if (ticker_running_.exchange(true)) return;
  // The host program's signals are for its own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    std::thread([this] { tick_forever(); }).detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Engine::tick_forever() noexcept {
  pthread_setname_np(pthread_self(), "cudasched");
  prctl(PR_SET_TIMERSLACK, 1UL);  // else the GPU is made ready 50 us late
  std::uint64_t launches_before = 0;
  int idle_ticks = 0;
  while (hot().scheduling.load(std::memory_order_relaxed)) {
    const std::int64_t now = now_ns();
    const bool active = tick(now);
    const std::uint64_t launches = hot().counters.totals().all_launches();
    const bool launching = launches != launches_before;
    launches_before = launches;
    bool schedules = false;
    std::int64_t ready = std::numeric_limits<std::int64_t>::max();  // when the first device wants to be made so
    for_each_device([&](const Device& device) {
      const bool latency = device.registered(Class::kLatency);
      schedules = schedules || latency || device.registered(Class::kBestEffort);
      if (const std::int64_t at = latency ? device.latency.ready_ns() : 0; at > now) ready = std::min(ready, at);
    });
    idle_ticks = !schedules ? kIdleTicks : active || launching ? 0 : std::min(idle_ticks + 1, kIdleTicks);
    if (idle_ticks == kIdleTicks && !needs_ticks()) {
      hot().ticker.sleep_deeply(kQuietTickNs, [&] { return !needs_ticks(); });
      continue;
    }
    const std::int64_t longest = active ? kActiveTickNs : launching ? kBusyTickNs : kIdleTickNs;
    const timespec time{0, std::clamp<std::int64_t>(ready - now_ns(), 1, longest)};
    nanosleep(&time, nullptr);
  }
}

// Does somebody look for a sign of life of this process, now or at any moment?
bool Engine::needs_ticks() noexcept {
  bool found = false;
  for_each_device([&](Device& device) {
    found = found || (device.registered(Class::kLatency) && device.latency.expected(now_ns())) ||
            (device.registered(Class::kBestEffort) && (device.gate.waits() || device.holds_launches()));
  });
  return found || hot().marks.needs_sweep();
}

// False: the table cannot be used any more, and scheduling is off.
bool Engine::tend(Device& device, std::int64_t now) noexcept {
  using arbiter::Condition;
  try {
    switch (device.tend(now)) {
      case Condition::kSound:
        break;
      case Condition::kRepaired:
        if (!std::exchange(said_repaired_, true)) {
          log::warning(device.table().why() + "; it was repaired, and its clients are registered anew. Let nothing " +
                       "but cudasched write to it");
        }
        break;
      case Condition::kMoved:
        if (!std::exchange(said_moved_, true)) {
          log::warning("the client table " + device.table().path() +
                       " was deleted or replaced; this program is registered anew in the one that is there now");
        }
        break;
      case Condition::kStranded:
        if (!std::exchange(said_stranded_, true)) {
          log::warning(device.table().why() + "; programs that start from now on and this one do not see each other");
        }
        break;
      case Condition::kLost:
        fail(device.table().why_lost());
        return false;
    }
  } catch (const std::exception& error) {
    fail(error.what());  // no memory for a message
    return false;
  }
  return true;
}

// A user's policy that does not return holds the gate's lock and cannot be cancelled: `cudasched status` names it.
void Engine::watch_policy(Device& device, std::int64_t now) noexcept {
  const int slot = device.slot(Class::kBestEffort);
  const std::int64_t since = policy_asked_since_ns();
  const bool hangs = since != 0 && now - since > kPolicyHangsNs;
  device.table().slot(slot).policy_since_ns.store(hangs ? since : 0, std::memory_order_relaxed);
  if (hangs && !std::exchange(said_policy_hangs_, true)) {
    log::error("this program's policy has not answered for a second and cannot be cancelled; its launch waits for it");
  }
}

bool Engine::tick(std::int64_t now) noexcept {
  const telemetry::Totals totals = hot().counters.totals();
  bool active = false;
  sweep_marks();
  if (totals.contested_streams > 0 && !contest_said_.exchange(true)) {
    log::warning(
        "latency and best-effort work are launched on one stream: latency work goes first, and threads outside of "
        "regions that launch there are not best effort; give each class a stream of its own");
  }
  for_each_device([&](Device& device) {
    if (device.queue() != nullptr) device.queue()->check();
    if (!tend(device, now)) return;
    for (int i = 0; i < kClassCount; ++i) {
      const int index = device.slot(static_cast<Class>(i));
      if (index < 0) continue;
      arbiter::Slot& slot = device.table().slot(index);
      slot.heartbeat_ns.store(now, std::memory_order_relaxed);
      // Counts are the process's, shown with each of its clients; a process with several GPUs shows them with each.
      slot.launches.store(totals.launches[static_cast<std::size_t>(i)], std::memory_order_relaxed);
      slot.device_launches.store(telemetry::device_launches(), std::memory_order_relaxed);
      if (static_cast<Class>(i) == Class::kBestEffort) {
        slot.gate_waits.store(totals.waits, std::memory_order_relaxed);
        slot.gate_wait_ns.store(totals.wait_ns, std::memory_order_relaxed);
      }
    }
    if (device.registered(Class::kLatency)) {
      device.latency.tick(now);
      active = active || device.latency.imminent(now);
    }
    if (device.gate.registered()) device.peers.refresh(now);
    device.gate.report_overdue(now);
    if (device.gate.registered()) {
      watch_policy(device, now);
      device.gate.write_again();
      if (const std::string_view why = device.gate.refused_policy(); !why.empty() && !policy_refused_.exchange(true)) {
        std::array<char, 256> message{};
        std::snprintf(message.data(), message.size(),
                      "the policy was refused, and every launch goes at once from here on: %.*s",
                      static_cast<int>(why.size()), why.data());
        log::error(message.data());
      }
      // A client that was killed while idle holds nothing closed, but keeps the gate on.
      device.table().reap();
    }
  });
  return active;
}

void Engine::stop() noexcept {
  stopping_.store(true);
  // What the program has launched is to run, as it would have without us.
  for_each_device([](Device& device) {
    if (device.queue() != nullptr) device.queue()->stop(kNsPerSecond);
  });
  // A registration under way ends first.
  if (lock_briefly(mutex_)) mutex_.unlock();
  finish_collecting();
  if (!settings_.coverage_directory.empty()) write_coverage_report();
  hot().scheduling.store(false);
  // The ticker calls the driver under this lock alone, and no more once it has seen that scheduling is off.
  if (lock_briefly(LatencyActivity::probe_mutex())) LatencyActivity::probe_mutex().unlock();
  for_each_device([](Device& device) {
    device.save_predictor();
    for (int i = 0; i < kClassCount; ++i) {
      const int slot = device.slot(static_cast<Class>(i));
      if (slot >= 0) device.table().release(slot);
    }
    device.table().wake_all();
  });
}

void Engine::write_coverage_report() noexcept {
  try {
    if (coverage_error_.empty()) {
      // What is still running when a program exits has not run; it is waited for, so that the two counts agree.
      CUcontext context = nullptr;
      if (driver::table().context_get_current(&context) == CUDA_SUCCESS && context != nullptr) {
        driver::table().context_synchronize();
      }
      telemetry::flush_coverage();
    }
  } catch (const std::exception& error) {
    coverage_error_ = error.what();
  }
  const std::uint64_t seen = hot().counters.totals().all_launches();
  const std::uint64_t ran = telemetry::device_launches();
  std::string name = settings_.name.empty() ? program_name() : settings_.name;
  std::string error = coverage_error_;
  for (std::string* text : {&name, &error}) {
    std::replace_if(text->begin(), text->end(), [](unsigned char c) { return c < 0x20 || c == '"' || c == '\\'; }, ' ');
  }
  const std::string path = settings_.coverage_directory + "/coverage-" + std::to_string(getpid()) + ".json";
  if (std::FILE* file = std::fopen(path.c_str(), "we")) {
    std::fprintf(file,
                 "{\"pid\": %d, \"name\": \"%s\", \"hook_launches\": %llu, \"device_launches\": %llu, "
                 "\"coverage\": %.6f, \"error\": \"%s\"}\n",
                 getpid(), name.c_str(), static_cast<unsigned long long>(seen), static_cast<unsigned long long>(ran),
                 ran == 0 ? (seen == 0 ? 1.0 : 0.0) : static_cast<double>(seen) / static_cast<double>(ran),
                 error.c_str());
    std::fclose(file);
  } else {
    log::warning("the coverage report " + path + " cannot be written: " + std::strerror(errno));
  }
}

void Engine::reset_in_child() noexcept {
  // The parent's slots, events and thread are the parent's. What was reached through them is left to leak: other
  // threads' state in it may be torn.
  hot().scheduling.store(false);
  hot().only_device.store(nullptr);
  hot().captures.store(0);
  hot().counters.reset();
  hot().marks.reset();
  hot().event_origins.clear();
  hot().host_backoff.reset(latency_regions(this_thread()));
  for (auto& place : devices_) {
    Device* const device = place.exchange(nullptr);
    if (device == nullptr) continue;
    if (device->queue() != nullptr) device->queue()->abandon();
    device->table().abandon();
  }
  if (offload_.forget_queues != nullptr) offload_.forget_queues();
  telemetry::reset_collecting_in_child();
  driver::functions().reset_in_child();
  driver::registry().reset_in_child();
  graphs_.reset_in_child();
  partitions().reset_in_child();
  started_ = false;
  job_.reset();
  LatencyActivity::reset_in_child();
  ticker_running_.store(false);
  off_reason_.clear();
  ThreadState& thread = this_thread();
  thread.context = nullptr;
  thread.device = nullptr;
  thread.normal_registered = false;
  thread.noted_stream = nullptr;
  thread.marked_stream = nullptr;
  for (int i = 0; i < thread.depth; ++i) {
    Region& region = thread.stack->regions[static_cast<std::size_t>(i)];
    region.devices = 0;
    if (region.region_class == Class::kBestEffort) hot().marks.entered(region.token);
  }
}

}  // namespace cudasched::runtime
