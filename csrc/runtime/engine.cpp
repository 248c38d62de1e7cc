#include "runtime/engine.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string_view>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/undisturbed.hpp"
#include "driver/driver.hpp"
#include "driver/registry.hpp"
#include "runtime/memory/memory.hpp"
#include "telemetry/cupti.hpp"

namespace cudasched::runtime {
namespace {

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

void Engine::watch_driver(void* real_driver) noexcept {
  slice_keeper_.watch(real_driver, settings_, a_tool_is_injected());
}

Device* Engine::find_device(ThreadState& thread) noexcept {
  CUcontext context = nullptr;
  if (driver::table().cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == nullptr) return nullptr;
  const std::uint64_t epoch = hot().context_epoch.load(std::memory_order_acquire);
  if (thread.context == context && thread.context_epoch == epoch) return thread.device;
  CUdevice handle = 0;
  if (driver::table().cuCtxGetDevice(&handle) != CUDA_SUCCESS) return nullptr;
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
  const Undisturbed undisturbed;
  try {
    const std::scoped_lock lock(mutex_);
    if (Device* known = place.load(std::memory_order_acquire)) return known;
    auto device = std::make_unique<Device>(handle, handle, settings_);
    place.store(device.get(), std::memory_order_release);
    return device.release();
  } catch (const std::exception& error) {
    lifecycle_.fail(error.what());
    return nullptr;
  }
}

bool Engine::prepare(Device& device, Class launch_class, ThreadState& thread) noexcept {
  try {
    name_thread(thread);
    if (!device.registered(launch_class)) {
      const Undisturbed undisturbed;
      const std::scoped_lock lock(mutex_);
      if (lifecycle_.stopping()) return false;
      if (launch_class == Class::kBestEffort) device.prepare_predictor(settings_, allocations_.get());
      if (launch_class == Class::kBestEffort && !job_) job_ = job_id(settings_.job, device_count_);
      device.register_client(launch_class, settings_, &graphs_, job_.value_or(0));
      if (launch_class == Class::kBestEffort && user_policy_) {
        device.gate.use_policy(schedule::Decider(*user_policy_));
      }
      const char* const why_not = launch_class == Class::kBestEffort ? why_no_offload() : nullptr;
      if (launch_class == Class::kBestEffort && why_not == nullptr) {
        device.use(&slices_);
        device.start_queue(settings_.launcher_spins);
      } else if (why_not != nullptr) {
        log::debug(std::string("launches are not offloaded: ") + why_not);
      }
      // From now on latency work may wait for launches that wait behind the gate.
      bool latency = false;
      for_each_device([&](Device& each) { latency = latency || each.registered(Class::kLatency); });
      for_each_device([&](Device& each) {
        if (latency && each.queue() != nullptr) each.queue()->latency_came();
      });
      ticker_.start();
      memory().publish(device);
      log::info("registered as a " + std::string(class_name(launch_class)) + " client in " + device.table().path());
    }
    if (Region* const region = thread.innermost(); launch_class == Class::kLatency && region != nullptr) {
      const std::uint32_t bit = 1U << device.ordinal();
      if (region->region_class == Class::kLatency && (region->devices & bit) == 0) {
        region->devices |= bit;
        device.latency.enter_region(*region);
      }
    }
    return true;
  } catch (const std::exception& error) {
    lifecycle_.fail(error.what());
    return false;
  }
}

const char* Engine::why_no_offload() const noexcept {
  if (!settings_.offload) return "the setting offload is off";
  if (!settings_.offload_beside_tools && a_tool_is_injected()) return "a tool is injected into this program";
  // Every launch is to be over when its call returns.
  const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  return blocking != nullptr && std::strcmp(blocking, "1") == 0 ? "CUDA_LAUNCH_BLOCKING is 1" : nullptr;
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

std::int64_t Engine::graph_ns(CUgraphExec exec) noexcept {
  Device* const device = hot().scheduling.load(std::memory_order_relaxed) ? current_device(this_thread()) : nullptr;
  return device == nullptr ? 0 : device->gate.graph_ns(exec);
}

void Engine::note_update(CUgraphExec exec, CUgraph graph, Slices::UpdateQueue* behind) noexcept {
  Device* const device = hot().scheduling.load(std::memory_order_relaxed) ? current_device(this_thread()) : nullptr;
  // A graph with slices needs no note: the measured times of its slices count.
  if (device != nullptr && !slices_.has_slices(exec) && graphs_.wants_note(exec)) {
    graphs_.note(exec, graph, [device](const predict::Query& query) { return device->gate.estimate_ns(query); });
  }
  slices_.updated(exec, graph, behind);
}

void Engine::configure(const std::string& name, const std::string& value) {
  // Settings that the engine reads anew after its begin.
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
  if (lifecycle_.attached() && !at_any_time) {
    throw ConfigError(name + " is decided by the program's first CUDA call, which has been made; set it before");
  }
  if (!lifecycle_.attached()) configured_.emplace_back(variable, value);
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
  note_place(stream);
}

void Engine::class_by_priority(std::uint64_t stream, Class value) {
  const std::scoped_lock lock(mutex_);
  if (hot().by_priority.bind(stream, value)) note_place(stream);
}

void Engine::note_place(std::uint64_t stream) {
  std::erase_if(bound_, [&](const Bound& known) { return known.stream == stream; });
  Bound bound{stream};
  driver::StreamFacts facts;
  if (lifecycle_.attached() && driver::registry().look_up(reinterpret_cast<CUstream>(stream), facts)) {
    bound.context = facts.context;
    bound.device = facts.device;
  }
  bound_.push_back(bound);
}

void Engine::unbind_stream(std::uint64_t stream) noexcept {
  const std::scoped_lock lock(mutex_);
  hot().streams.unbind(stream);
  Class left = Class::kNormal;
  if (!hot().by_priority.find(stream, left)) {
    std::erase_if(bound_, [&](const Bound& known) { return known.stream == stream; });
  }
  hot().marks.bound(!hot().streams.empty());
}

template <typename Ends>
void Engine::unbind_where(Ends&& ends) noexcept {
  if (hot().streams.empty() && hot().by_priority.empty()) return;
  const std::scoped_lock lock(mutex_);
  std::erase_if(bound_, [&](const Bound& known) {
    if (!ends(known)) return false;
    hot().streams.unbind(known.stream);
    hot().by_priority.unbind(known.stream);
    return true;
  });
  hot().marks.bound(!hot().streams.empty());
}

void Engine::stream_ends(std::uint64_t stream) noexcept {
  unbind_where([&](const Bound& known) { return known.stream == stream; });
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
    if (!lifecycle_.started())
      throw HookError("coverage needs the hook and an initialised driver: make a CUDA call first");
  }
  telemetry::cupti::start(telemetry::cupti::Use::kCount, cupti_path);
}

StateReport Engine::report() {
  const std::scoped_lock lock(mutex_);
  StateReport report;
  report.attached = lifecycle_.attached();
  report.scheduling = hot().scheduling.load();
  report.process_class = hot().process_class.load();
  report.driver_version = lifecycle_.driver_version();
  report.unknown_handles = driver::registry().unknown() + hot().marks.overflows();
  report.slices = slices_.counts();
  report.off_reason = lifecycle_.off_reason();
  report.driver_path = lifecycle_.driver_path();
  return report;
}

}  // namespace cudasched::runtime
