// What happens to the whole process, in the order in which it may: the shim loads us, the program initialises the
// driver, contexts end, something fails, the process forks, it exits. Clients register in between, at their first
// launch or region (Engine::prepare()).
//
// The parts that are set up, told and stopped here are the Engine's; what is known of the process itself is kept here.
// Nothing here is on the launch path. It takes the engine's lock, allocates and logs; at exit it waits for locks only
// briefly, because the thread that holds one may be the one that the exit interrupted.
#pragma once

#include <cuda.h>

#include <atomic>
#include <string>

namespace cudasched::runtime {

class Engine;

class Lifecycle {
 public:
  static constexpr int kLeastDriverVersion = 12040;  // 12.4, release 550: parameter sizes

  explicit Lifecycle(Engine& engine) noexcept : engine_(engine) {}
  Lifecycle(const Lifecycle&) = delete;
  Lifecycle& operator=(const Lifecycle&) = delete;

  // ---- begins
  // The shim loads us, at the first driver call: reads the settings and the driver's functions. Throws HookError.
  void attach(void* real_driver, const std::string& path);
  // Instead of attach(): nothing is taken over in this process, for a reason that it is told, once.
  void decline(const std::string& why);
  // cuInit has succeeded (each time). Scheduling begins; the handler for the exit is registered.
  void start() noexcept;

  // ---- a context ends. What is known by its handle or of its streams is forgotten before the driver ends it, because
  // handles come back for others.
  void context_ends(CUcontext context) noexcept;
  void primary_context_ends(CUdevice device) noexcept;
  // It is gone, or certain to go: nothing else retains it.
  void primary_context_ended(CUdevice device) noexcept;
  // After the driver: memory that went with a context, or, null, with those of the device.
  void memory_gone(int device, CUcontext context) noexcept;

  // ---- fails: an internal fault. Scheduling goes off for the process, that is said once, and every call passes
  // through from then on.
  void fail(const std::string& why) noexcept;

  // ---- exits: what is queued is submitted, for at most a second; then every call passes through. Once.
  void stop() noexcept;
  // The process ends by _exit(), maybe in a signal handler: the ticker thread stops, if this process has one.
  void finish() noexcept;

  // ---- what the engine asks; the caller holds its lock, but for the first two
  bool attached() const noexcept { return attached_.load(std::memory_order_acquire); }
  bool stopping() const noexcept { return stopping_; }
  bool started() const noexcept { return started_; }
  const std::string& driver_path() const noexcept { return driver_path_; }
  int driver_version() const noexcept { return driver_version_; }
  const std::string& off_reason() const noexcept { return off_reason_; }  // empty: scheduling is not off for good

 private:
  void context_invalidated(CUcontext context) noexcept;

  // ---- forks: the locks are held across it, so that the child finds them whole
  void before_fork() noexcept;
  void after_fork_in_parent() noexcept;
  // Everything of the parent's is forgotten; scheduling starts anew with the child's own cuInit.
  void after_fork_in_child() noexcept;

  void report_coverage() noexcept;
  void write_coverage_report(const std::string& error) noexcept;

  Engine& engine_;
  std::atomic<bool> attached_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<int> process_{0};  // that has begun
  bool started_ = false;
  bool handlers_registered_ = false;
  std::string driver_path_;
  int driver_version_ = 0;
  std::string off_reason_;
  std::string coverage_error_;
};

}  // namespace cudasched::runtime
