// This process's memory on the GPUs: the allocations held (holdings.hpp), the limit, the words in the shared tables,
// and how memory is given back (schedule/give_back.hpp).
//
// The hook (hook/memory.cpp) calls this room around each call that allocates or frees, on the program's threads. These
// threads may hold the locks of the program's allocator, so every wait here is bounded. One thread for each GPU empties
// caches when another process asks for memory. Meanwhile that thread makes no call of Python and holds no lock of the
// engine.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/spin_lock.hpp"
#include "cudasched/engine.h"
#include "runtime/memory/holdings.hpp"
#include "runtime/memory/host_memory.hpp"
#include "runtime/memory/pageable.hpp"
#include "runtime/memory/pager.hpp"
#include "runtime/memory/pools.hpp"

namespace cudasched::arbiter {
struct SlotMemory;
class Table;
}  // namespace cudasched::arbiter

namespace cudasched::runtime {

class Device;
struct Settings;

class Memory {
 public:
  Holdings holdings;
  Pools pools;
  Pageable pageable;
  Pager pager{pageable};

  // The limit and how long others are waited for. Throws ConfigError: the limit is below the bytes held.
  void configure(const Settings& settings);

  // The class in which the calling thread allocates.
  static Class class_of_thread() noexcept;

  // Does a latency client wait for memory? Of a request that is not believed any more: no.
  static bool asked(arbiter::Table& table) noexcept;
  // Before an allocation of this class: lets a request of another process go first. One load where there is none.
  void yield(int device, Class client_class) noexcept;

  // Publishes the process's memory on a device, for others to read, and starts the thread that gives some back when
  // others ask. Also the ticker's.
  void publish(int device) noexcept;
  void publish(Device& device) noexcept;

  // Publishes the sizes of the program's pools. The ticker's alone.
  void publish_pools(std::int64_t now_ns) noexcept;

  // The allocator's own cache, which a thread of the engine's empties when another process asks. Null: there is none.
  void use_cache(cudasched_release_cache release, void* context);
  // Looks for the cache of a program that has told of none. The ticker's alone: takes the loader's lock.
  void look_for_cache(std::int64_t now_ns) noexcept;

  // The bytes that a program with a limit may still allocate on a GPU that has the host's memory: the host's available
  // memory. kUnknownMemory: the GPU has its own memory, or there is no limit. Reads a file, for some tens of
  // microseconds.
  std::uint64_t room(int device) noexcept;

  // Logs a failed allocation, with each client's memory. A line at most every ten seconds.
  void report_failure(int device, Class client_class, std::uint64_t bytes, const std::string& unanswered) noexcept;
  void report_limit(int device, std::uint64_t bytes) noexcept;

  std::int64_t give_back_ns() const noexcept { return give_back_ns_.load(std::memory_order_relaxed); }

  // The pools of a device, as the driver says how large they are.
  void refresh_pools(int device) noexcept;

  // At exit, once scheduling is off: from here on no cache is emptied, and no table written. Waits for one that is
  // being emptied, for a while.
  void stop() noexcept;
  void reset_in_child() noexcept;

 private:
  friend class MemoryRequest;
  // The requests of this process's threads, by device.
  struct Asking {
    SpinLock lock;
    std::array<int, Holdings::kDevices> requests{};
  };

  // For a GPU with a best-effort client and something to give.
  void start_giver(Device& device) noexcept;
  void run_giver(Device& device) noexcept;
  bool answer_request(Device& device, arbiter::SlotMemory& words) noexcept;
  void empty_caches_and_answer(Device& device, std::uint64_t number) noexcept;
  void answer(Device& device, std::uint64_t number, bool gave, std::uint64_t before) noexcept;
  bool can_give(const Device& device) noexcept;
  void empty_caches(const Device& device) noexcept;
  void wait_for_requests(Device& device) noexcept;
  bool may_say(std::atomic<std::int64_t>& said_ns) noexcept;

  std::atomic<std::int64_t> give_back_ns_{0};
  std::atomic<cudasched_release_cache> release_{nullptr};
  std::atomic<void*> release_context_{nullptr};
  std::array<std::atomic<bool>, Holdings::kDevices> giver_runs_{};
  std::array<std::atomic<bool>, Holdings::kDevices> empties_{};  // a cache
  enum class Integrated : std::uint8_t { kUnasked, kNo, kYes };
  std::array<std::atomic<Integrated>, Holdings::kDevices> integrated_{};
  std::atomic<int> giving_{0};  // threads that are at the tables, or empty a cache
  std::atomic<bool> stopped_{false};
  Asking asking_;
  std::int64_t looked_ns_ = 0;        // for a cache; the ticker's
  std::int64_t looked_pools_ns_ = 0;  // the ticker's, too
  bool decided_ = false;
  std::atomic<std::int64_t> said_failure_ns_{0};
  std::atomic<std::int64_t> said_limit_ns_{0};
};

Memory& memory() noexcept;

// A latency client's request for memory that an allocation of its did not get: asks from its construction to its
// destruction. Asks for cached memory first, and then for memory that is moved away, until there is none of either.
class MemoryRequest {
 public:
  MemoryRequest(int device, std::uint64_t bytes) noexcept;
  ~MemoryRequest();
  MemoryRequest(const MemoryRequest&) = delete;
  MemoryRequest& operator=(const MemoryRequest&) = delete;

  // Waits until another client has answered, or the request's time is over: the allocation is to be tried again. False:
  // the caller has tried since the end.
  bool next() noexcept;

  // The clients that have not answered, "train.py (4711)"; empty: all have.
  std::string unanswered() const;

 private:
  bool ask(bool for_moves) noexcept;
  std::uint64_t owing() const noexcept;

  Device* device_ = nullptr;
  std::uint64_t number_ = 0;
  std::uint64_t owed_ = 0;  // slots that were asked and had not answered at the last look
  std::uint64_t late_ = 0;  // that had not answered in time
  std::uint64_t bytes_ = 0;
  // Of the GPU, moved beside the missing bytes: the driver needs memory for kernels that the client loads next, and
  // does not give all free memory as one allocation. A second try doubles it.
  std::uint64_t spare_bytes_ = std::uint64_t{256} << 20;
  std::int64_t until_ns_ = 0;
  std::uint64_t free_bytes_ = 0;  // of the GPU, when it last asked for moves
  bool asks_ = false;             // counts as one of the process's requests
  bool moves_ = false;
  bool over_ = false;
};

}  // namespace cudasched::runtime
