#include "runtime/lifecycle.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/sleep.hpp"
#include "base/undisturbed.hpp"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "driver/registry.hpp"
#include "queue/router.hpp"
#include "runtime/collecting.hpp"
#include "runtime/counts.hpp"
#include "runtime/engine.hpp"
#include "runtime/gil.hpp"
#include "runtime/memory/memory.hpp"
#include "runtime/partitions.hpp"
#include "runtime/tracing.hpp"
#include "telemetry/cupti.hpp"

namespace cudasched::runtime {
namespace {

// For the exit handler: the thread that holds the lock may be the one that the exit interrupted.
bool lock_briefly(std::mutex& mutex) noexcept {
  for (int tries = 0; tries < 200; ++tries) {
    if (mutex.try_lock()) return true;
    sleep_ns(kNsPerMs);
  }
  return false;
}

}  // namespace

// ---- begins

void Lifecycle::attach(void* real_driver, const std::string& path) {
  const std::scoped_lock lock(engine_.mutex_);
  driver::table().load(real_driver);
  driver_path_ = path;
  std::vector<std::string> complaints;
  const Settings chosen = engine_.settings_;
  engine_.settings_ = Settings::read([](const char* name) -> const char* { return std::getenv(name); }, complaints);
  if (engine_.class_was_set_) {
    engine_.settings_.process_class = chosen.process_class;
    engine_.settings_.priority = chosen.priority;
    engine_.settings_.slo_ns = chosen.slo_ns;
  }
  for (const auto& [variable, value] : engine_.configured_) engine_.settings_.set(variable, value);
  for (const std::string& complaint : complaints) log::warning(complaint);
  hot().host_backoff.configure(engine_.settings_.host_backoff_limit_ns(), engine_.settings_.policy == "harvest");
  engine_.slices_.configure(engine_.settings_.slices);
  memory().configure(engine_.settings_);
  engine_.note_policy();
  hot().process_class.store(engine_.settings_.process_class, std::memory_order_relaxed);
  if (!handlers_registered_) {
    handlers_registered_ = true;
    pthread_atfork([] { engine().lifecycle().before_fork(); }, [] { engine().lifecycle().after_fork_in_parent(); },
                   [] { engine().lifecycle().after_fork_in_child(); });
  }
  if (engine_.allocations_ == nullptr) engine_.allocations_ = std::make_unique<predict::Allocations>();
  attached_.store(true, std::memory_order_release);
  log::info("hooked the driver at " + path);
}

void Lifecycle::decline(const std::string& why) {
  const std::scoped_lock lock(engine_.mutex_);
  off_reason_ = why;
  log::warning(why);
}

void Lifecycle::start() noexcept {
  // Takes the dynamic loader's lock, which another thread may hold while its library's constructor waits for ours.
  find_gil_check();
  const Undisturbed undisturbed;
  try {
    const std::scoped_lock lock(engine_.mutex_);
    if (started_ || stopping_ || !off_reason_.empty()) return;
    started_ = true;
    auto& driver = driver::table();
    if (driver.cuDriverGetVersion(&driver_version_) != CUDA_SUCCESS) driver_version_ = 0;
    if (driver_version_ < kLeastDriverVersion) {
      off_reason_ = "the NVIDIA driver at " + driver_path_ + " supports CUDA " +
                    std::to_string(driver_version_ / 1000) + "." + std::to_string(driver_version_ % 1000 / 10) +
                    "; scheduling needs 12.4 (release 550) or later: every launch passes through unscheduled";
    } else if (driver.lacks != nullptr) {
      off_reason_ = "the NVIDIA driver at " + driver_path_ + " has no " + driver.lacks +
                    ", which drivers have from CUDA 12.4 on: every launch passes through unscheduled";
    }
    if (!off_reason_.empty()) {
      log::warning(off_reason_);
      return;
    }
    if (driver.cuDeviceGetCount(&engine_.device_count_) != CUDA_SUCCESS || engine_.device_count_ < 1) return;
    process_.store(getpid());
    // Registered after the driver's own handler, so that it runs before it.
    static const bool at_exit = std::atexit([] { engine().lifecycle().stop(); }) == 0 &&
                                std::at_quick_exit([] { engine().lifecycle().stop(); }) == 0;
    (void)at_exit;
    const bool covers = !engine_.settings_.coverage_directory.empty();
    if (covers) {
      write_coverage_report("the program did not come to an end");
      try {
        telemetry::cupti::start(telemetry::cupti::Use::kCount, engine_.settings_.cupti_path);
      } catch (const std::exception& error) {
        coverage_error_ = error.what();
        log::warning(coverage_error_);
      }
    }
    hot().scheduling.store(true, std::memory_order_release);
    collect_if_asked(engine_.settings_.cupti_path);
    trace_if_asked();
    // The ticker writes the files of the end where the process ends by _exit().
    if (covers || telemetry::collecting() || telemetry::tracing()) engine_.ticker_.start();
    if (engine_.device_count_ == 1) {
      CUdevice only = 0;
      if (driver.cuDeviceGet(&only, 0) == CUDA_SUCCESS) {
        auto device = std::make_unique<Device>(only, 0, engine_.settings_);
        hot().only_device.store(device.get(), std::memory_order_release);
        engine_.devices_[0].store(device.release(), std::memory_order_release);
      }
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

// ---- a context ends

void Lifecycle::context_ends(CUcontext context) noexcept {
  engine_.for_each_device([&](Device& device) {
    device.latency.forget_all_streams();
    if (context == nullptr) return;
    device.latency.forget_context(context);
    device.gate.forget_context(context);
  });
  if (context != nullptr) telemetry::forget_context(context);
  driver::registry().context_ends(context);
  if (context != nullptr) engine_.unbind_streams_of(context);
  context_invalidated(context);
}

void Lifecycle::primary_context_ends(CUdevice handle) noexcept {
  // Null: all contexts. The program's green contexts end with it, and do not tell of which device they are; after a
  // fault the driver may not tell of this one.
  const bool green = driver::green_contexts_exist.load(std::memory_order_relaxed);
  CUcontext const context = green ? nullptr : driver::primary_context(handle);
  engine_.for_each_device([&](Device& device) {
    if (device.ordinal() != handle) return;
    device.latency.forget_all_streams();
    device.gate.forget_context(nullptr);
  });
  telemetry::forget_context(context);
  context_invalidated(context);
}

void Lifecycle::primary_context_ended(CUdevice handle) noexcept {
  engine_.unbind_streams_of_device(handle);
  partitions().primary_context_ended(handle);
  engine_.for_each_device([&](Device& device) {
    if (device.ordinal() == handle) device.latency.forget_context(nullptr);
  });
}

void Lifecycle::context_invalidated(CUcontext context) noexcept {
  forget_streams_of(context);
  engine_.slices_.context_ends(context);
  hot().context_epoch.fetch_add(1);
  driver::functions().forget_handles();
}

void Lifecycle::memory_gone(int device, CUcontext context) noexcept {
  memory().holdings.context_ended(device, context);
  engine_.for_each_device([&](Device& each) { memory().publish(each); });
}

// ---- fails

void Lifecycle::fail(const std::string& why) noexcept {
  if (!hot().scheduling.exchange(false)) return;
  engine_.for_each_device([](Device& device) {
    if (device.queue() != nullptr) device.queue()->fail();
  });
  engine_.for_each_device([](Device& device) {
    if (device.registered(Class::kLatency)) device.table().clear_active(device.slot(Class::kLatency));
    device.table().wake_all();
  });
  try {
    const std::string reason = why == std::bad_alloc().what() ? "there is not enough memory" : why;
    log::error("scheduling is off for this process: " + reason);
    const std::scoped_lock lock(engine_.mutex_);
    off_reason_ = reason;
  } catch (const std::exception&) {
    log::error("scheduling is off for this process: out of memory");
  }
}

// ---- forks

void Lifecycle::before_fork() noexcept {
  engine_.mutex_.lock();
  LatencyActivity::probe_mutex().lock();
  engine_.regions_.moving_lock_.lock();
}

void Lifecycle::after_fork_in_parent() noexcept {
  engine_.regions_.moving_lock_.unlock();
  LatencyActivity::probe_mutex().unlock();
  engine_.mutex_.unlock();
}

void Lifecycle::after_fork_in_child() noexcept {
  // The parent's slots, events and thread are the parent's. The memory behind these is left to leak: other threads'
  // state there may be torn.
  hot().scheduling.store(false);
  hot().only_device.store(nullptr);
  hot().captures.store(0);
  hot().counters.reset();
  hot().marks.reset();
  hot().event_origins.clear();
  hot().host_backoff.reset(latency_regions(this_thread()));
  for (auto& place : engine_.devices_) {
    Device* const device = place.exchange(nullptr);
    if (device == nullptr) continue;
    if (device->queue() != nullptr) device->queue()->abandon();
    device->table().abandon();
  }
  queue::router().forget_queues();
  reset_counts_in_child();
  telemetry::reset_collecting_in_child();
  telemetry::reset_tracing_in_child();
  driver::functions().reset_in_child();
  driver::registry().reset_in_child();
  engine_.graphs_.reset_in_child();
  engine_.slices_.reset_in_child();
  engine_.slice_keeper_.reset_in_child();
  partitions().reset_in_child();
  memory().reset_in_child();
  started_ = false;
  engine_.job_.reset();
  LatencyActivity::reset_in_child();
  engine_.ticker_.reset_in_child();
  off_reason_.clear();
  ThreadState& thread = this_thread();
  thread.context = nullptr;
  thread.device = nullptr;
  thread.noted_stream = nullptr;
  thread.marked_stream = nullptr;
  for (int i = 0; i < thread.depth; ++i) {
    Region& region = thread.stack->regions[static_cast<std::size_t>(i)];
    region.devices = 0;
    if (region.region_class == Class::kBestEffort) hot().marks.entered(region.token);
  }
  after_fork_in_parent();  // the locks
}

// ---- exits

void Lifecycle::finish() noexcept {
  constexpr std::int64_t kPatienceNs = 5 * kNsPerSecond;
  // A child of vfork() is another process in this one's memory.
  if (process_.load() == getpid() && !stopping_.load()) engine_.ticker_.finish(kPatienceNs);
}

void Lifecycle::stop() noexcept {
  if (stopping_.exchange(true)) return;
  const Undisturbed undisturbed;
  // The program's launches are to run, as without us.
  engine_.for_each_device([](Device& device) {
    if (device.queue() != nullptr) device.queue()->stop(kNsPerSecond);
  });
  // A registration under way ends first.
  if (lock_briefly(engine_.mutex_)) engine_.mutex_.unlock();
  engine_.slices_.stop();
  finish_collecting();
  telemetry::stop_tracing();
  if (!engine_.settings_.coverage_directory.empty()) report_coverage();
  hot().scheduling.store(false);
  memory().stop();
  // The ticker calls the driver under this lock alone, and no more once it has seen that scheduling is off.
  if (lock_briefly(LatencyActivity::probe_mutex())) LatencyActivity::probe_mutex().unlock();
  engine_.ticker_.publish_counts();
  engine_.for_each_device([](Device& device) {
    device.save_predictor();
    for (int i = 0; i < kClassCount; ++i) {
      const int slot = device.slot(static_cast<Class>(i));
      if (slot >= 0) device.table().release(slot);
    }
    device.table().wake_all();
  });
}

void Lifecycle::report_coverage() noexcept {
  try {
    if (coverage_error_.empty()) {
      // Work that still runs at the exit is not counted yet; the wait makes the two counts agree.
      CUcontext context = nullptr;
      if (driver::table().cuCtxGetCurrent(&context) == CUDA_SUCCESS && context != nullptr) {
        driver::table().cuCtxSynchronize();
      } else {
        engine_.for_each_device([](Device& device) { driver::synchronize_primary(device.ordinal()); });
      }
      telemetry::cupti::flush(telemetry::cupti::Use::kCount, /*all=*/true);
    }
  } catch (const std::exception& error) {
    coverage_error_ = error.what();
  }
  write_coverage_report(coverage_error_);
}

void Lifecycle::write_coverage_report(const std::string& why_not) noexcept {
  const std::uint64_t seen = hot().counters.launches();
  const std::uint64_t ran = telemetry::cupti::device_launches();
  std::string name = engine_.settings_.name.empty() ? program_name() : engine_.settings_.name;
  std::string error = why_not;
  for (std::string* text : {&name, &error}) {
    std::replace_if(text->begin(), text->end(), [](unsigned char c) { return c < 0x20 || c == '"' || c == '\\'; }, ' ');
  }
  const std::string path = engine_.settings_.coverage_directory + "/coverage-" + std::to_string(getpid()) + ".json";
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

}  // namespace cudasched::runtime
