#include "runtime/engine.hpp"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "driver/registry.hpp"
#include "runtime/collecting.hpp"
#include "runtime/counts.hpp"
#include "runtime/engine_policy.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/partitions.hpp"
#include "runtime/tracing.hpp"
#include "telemetry/collector.hpp"
#include "telemetry/coverage.hpp"

namespace cudasched::runtime {
namespace {

// For the exit handler: the thread that holds the lock may be the one that the exit interrupted.
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
  hot().host_backoff.configure(settings_.host_backoff_limit_ns(), settings_.policy == "harvest");
  slices_.configure(settings_.slices);
  memory().configure(settings_);
  note_policy();
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
    trace_if_asked();
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
        device.use(&slices_);
        device.start_queue(*offload_.calls, offload_.started, settings_.launcher_spins);
      }
      // From now on what waits behind the gate may be what latency work waits for.
      bool latency = false;
      for_each_device([&](Device& each) { latency = latency || each.registered(Class::kLatency); });
      for_each_device([&](Device& each) {
        if (latency && each.queue() != nullptr) each.queue()->latency_came();
      });
      ticker_.start();
      memory().publish(device);
      memory().start_givers();
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
  if (!settings_.offload || offload_.calls == nullptr) return false;
  if (!settings_.offload_beside_tools && a_tool_is_injected()) return false;
  // Every launch is to be over when its call returns.
  const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  return blocking == nullptr || std::strcmp(blocking, "1") != 0;
}

void Engine::set_process_class(Class value, std::int32_t priority, std::int64_t slo_ns) {
  const std::scoped_lock lock(mutex_);
  class_was_set_ = true;
  use_class(value, priority, slo_ns);
}

void Engine::use_class(Class value, std::int32_t priority, std::int64_t slo_ns) {
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

void Engine::note_graph(CUgraphExec exec, CUgraph graph, unsigned long long flags) noexcept {
  if (!hot().scheduling.load(std::memory_order_relaxed)) return;
  Device* const device = current_device(this_thread());
  if (device == nullptr) return;
  device->prepare_predictor(settings_, allocations_.get());
  const Graphs::Estimate estimate = [device](const predict::Query& query) { return device->gate.estimate_ns(query); };
  graphs_.note(exec, graph, estimate);
  if (!slices_.on() || !wants_offload()) return;
  const std::optional<GivenPriority> given = graphs_.priority(exec);
  const GraphTimes times{estimate, [device](CUgraphExec of) { return device->gate.measured_graph_ns(of); }};
  slices_.made(exec, graph, flags, given ? std::optional(given->priority) : std::nullopt, times);
}

void Engine::note_update(CUgraphExec exec, CUgraph graph, Slices::Behind* behind) noexcept {
  Device* const device = hot().scheduling.load(std::memory_order_relaxed) ? current_device(this_thread()) : nullptr;
  // Of one that goes in slices, what these take is what counts, and they are measured.
  if (device != nullptr && !slices_.has_slices(exec)) {
    graphs_.note(exec, graph, [device](const predict::Query& query) { return device->gate.estimate_ns(query); });
  }
  slices_.updated(exec, graph, behind);
}

void Engine::configure(const std::string& name, const std::string& value) {
  // What the engine looks at anew after it has begun.
  static constexpr std::string_view kAtAnyTime[] = {
      "CUDASCHED_POLICY",          "CUDASCHED_LEAD_US",      "CUDASCHED_MAX_INFLATION",
      "CUDASCHED_LONG_US",         "CUDASCHED_LINGER_US",    "CUDASCHED_MARGIN_US",
      "CUDASCHED_HOST_BACKOFF_MS", "CUDASCHED_MEMORY_LIMIT", "CUDASCHED_GIVE_BACK_MS"};
  std::string variable = "CUDASCHED_" + (name == "client_class" ? "class" : name);
  for (char& c : variable) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  if (variable == "CUDASCHED_LOG") return log::set_level(value);
  if (variable == "CUDASCHED_LOG_FILE") return log::set_file(value);

  const std::scoped_lock lock(mutex_);
  Settings checked;
  checked.set(variable, value);  // is there such a setting, and has the value a meaning?
  const bool of_memory = variable == "CUDASCHED_MEMORY_LIMIT" || variable == "CUDASCHED_GIVE_BACK_MS";
  if (of_memory) {
    checked = settings_;
    checked.set(variable, value);
    memory().configure(checked);
  }
  const bool at_any_time = std::find(std::begin(kAtAnyTime), std::end(kAtAnyTime), variable) != std::end(kAtAnyTime);
  if (attached() && !at_any_time) {
    throw ConfigError(name + " is decided by the program's first CUDA call, which has been made; set it before");
  }
  if (!attached()) configured_.emplace_back(variable, value);
  settings_.set(variable, value);  // and nothing else: the rest is read without the lock
  hot().host_backoff.configure(settings_.host_backoff_limit_ns(), settings_.policy == "harvest");
  if (variable == "CUDASCHED_HOST_BACKOFF_MS" || of_memory) return;
  const schedule::Policy* const policy = variable == "CUDASCHED_POLICY" ? schedule::find_policy(value) : nullptr;
  if (policy != nullptr) user_policy_.reset();
  note_policy();
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
  note_policy();
  ticker_.policy_changed();
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
  std::erase_if(bound_, [&](const Bound& known) { return known.stream == stream; });
  Bound bound{stream};
  if (attached() && driver::table().context_get_current(&bound.context) == CUDA_SUCCESS && bound.context != nullptr) {
    driver::table().context_get_device(&bound.device);
  }
  bound_.push_back(bound);
}

void Engine::unbind_stream(std::uint64_t stream) noexcept {
  const std::scoped_lock lock(mutex_);
  hot().streams.unbind(stream);
  std::erase_if(bound_, [&](const Bound& known) { return known.stream == stream; });
  hot().marks.bound(!hot().streams.empty());
}

template <typename Ends>
void Engine::unbind_where(Ends&& ends) noexcept {
  if (hot().streams.empty()) return;
  const std::scoped_lock lock(mutex_);
  std::erase_if(bound_, [&](const Bound& known) {
    if (!ends(known)) return false;
    hot().streams.unbind(known.stream);
    return true;
  });
  hot().marks.bound(!hot().streams.empty());
}

void Engine::unbind_streams_of(CUcontext context) noexcept {
  unbind_where([&](const Bound& known) { return known.context == context; });
}

void Engine::unbind_streams_of_device(CUdevice device) noexcept {
  unbind_where([&](const Bound& known) { return known.device == device; });
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
  report.unknown_handles = driver::registry().unknown() + hot().marks.overflows();
  report.slices = slices_.counts();
  report.off_reason = off_reason_;
  report.driver_path = driver_path_;
  return report;
}

void Engine::stop() noexcept {
  stopping_.store(true);
  // What the program has launched is to run, as it would have without us.
  for_each_device([](Device& device) {
    if (device.queue() != nullptr) device.queue()->stop(kNsPerSecond);
  });
  // A registration under way ends first.
  if (lock_briefly(mutex_)) mutex_.unlock();
  slices_.stop();
  finish_collecting();
  telemetry::stop_tracing();
  if (!settings_.coverage_directory.empty()) write_coverage_report();
  hot().scheduling.store(false);
  memory().stop();
  // The ticker calls the driver under this lock alone, and no more once it has seen that scheduling is off.
  if (lock_briefly(LatencyActivity::probe_mutex())) LatencyActivity::probe_mutex().unlock();
  ticker_.publish_counts();
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
  const std::uint64_t seen = hot().counters.launches();
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
  reset_counts_in_child();
  telemetry::reset_collecting_in_child();
  telemetry::reset_tracing_in_child();
  driver::functions().reset_in_child();
  driver::registry().reset_in_child();
  graphs_.reset_in_child();
  slices_.reset_in_child();
  partitions().reset_in_child();
  memory().reset_in_child();
  started_ = false;
  job_.reset();
  LatencyActivity::reset_in_child();
  ticker_.reset_in_child();
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
