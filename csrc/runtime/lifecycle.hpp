// The events of the whole process, in their order: the shim loads us, the program initialises the driver, contexts end,
// something fails, the process forks or exits. Clients register in between, at their first launch or region
// (Engine::prepare()).
//
// The Engine has the parts that are set up, told and stopped here; the Lifecycle has the state of the process itself.
// Nothing here is on the launch path. Calls take the engine's lock, allocate and log. At exit they wait for locks only
// briefly, because the exit may have interrupted the thread that holds one.
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

  // ---- a context ends. The engine forgets the context's handle and streams before the driver ends the context,
  // because handles come back for others.
  void context_ends(CUcontext context) noexcept;
  void primary_context_ends(CUdevice device) noexcept;
  // It is gone, or certain to go: nothing else retains it.
  void primary_context_ended(CUdevice device) noexcept;
  // After the driver: memory that went with a context, or, null, with those of the device.
  void memory_gone(int device, CUcontext context) noexcept;

  // ---- fails: an internal fault. Scheduling goes off for the process, with one message, and every call passes through
  // from then on.
  void fail(const std::string& why) noexcept;

  // ---- exits: queued launches are submitted, for at most a second; then every call passes through. Once.
  void stop() noexcept;
  // The process ends by _exit(), maybe in a signal handler: the ticker thread stops, if this process has one.
  void finish() noexcept;

  // ---- the engine's questions; the caller holds the engine's lock, but for the first two
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
