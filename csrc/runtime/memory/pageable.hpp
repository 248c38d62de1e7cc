// The large plain allocations of a best-effort process, in chunks of virtual memory (memory/pool.hpp), under the
// setting `pageable`. To the program they are as the driver's: hook/memory.cpp answers questions about them, and a free
// waits for the work of the context and gives the memory back at once. They live in the primary context of the one GPU
// that the process sees; that context stays when the program releases it.
//
// The driver allocates instead, from then on, once the program has asked for a handle that other processes may open, or
// has reset its context; and while a stream captures.
//
// Their memory may be away (pager.hpp). A free then counts as late: it is carried out once the memory is back. A late
// free waits for the launches that were in the ring before it.
//
// Threads: any; never on the launch path. A function that returns nothing, or false, leaves the call to the driver.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/pool.hpp"
#include "queue/order.hpp"

namespace cudasched::runtime {

class Pageable {
 public:
  static constexpr std::size_t kLeastBytes = std::size_t{2} << 20;

  void configure(bool wanted) noexcept { wanted_.store(wanted, std::memory_order_relaxed); }

  std::optional<CUresult> allocate(CUdeviceptr* pointer, std::size_t bytes) noexcept;
  // Once all of the context's work is done, or, while a stream captures, later. Everything queued was submitted. False:
  // none of ours.
  bool free(CUdeviceptr pointer) noexcept;
  // For a free on a stream: the memory goes back with the next free that waits, or by free_late(), at the end of a
  // capture too.
  bool free_later(CUdeviceptr pointer) noexcept;
  bool owes() const noexcept { return late_.load(std::memory_order_relaxed); }
  // Everything queued was submitted. False: nothing was freed.
  bool free_late() noexcept;
  // The same, of a caller that is inside the barrier, or keeps it shut.
  bool carry_out_frees() noexcept;

  struct Block {
    CUdeviceptr begin = 0;
    std::size_t bytes = 0;  // as the program asked
    CUcontext context = nullptr;
  };
  std::optional<Block> find(CUdeviceptr pointer) noexcept;

  // Null: nothing was allocated here.
  memory::Pool* pool_made() noexcept;

  // From here on all allocations are plain.
  void stop() noexcept { stopped_.store(true, std::memory_order_relaxed); }
  // The primary context is about to be reset: no work runs any more, and the memory goes. `is_gone`: it has gone.
  void drop(bool is_gone) noexcept;

  void reset_in_child() noexcept;

 private:
  struct Entry {
    std::size_t bytes = 0;
    bool is_late = false;       // freed by the program, and not yet by us
    queue::Position after = 0;  // of the queue, when the program freed it
  };

  memory::Pool* pool() noexcept;
  bool take(std::vector<CUdeviceptr>& pointers, bool all) noexcept;
  void give_back(const std::vector<CUdeviceptr>& pointers) noexcept;

  std::atomic<bool> wanted_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<bool> used_{false};  // there have been blocks
  std::atomic<bool> late_{false};  // some are
  std::mutex taking_;              // of a thread that takes blocks: what another one took may be a new block by then
  std::mutex mutex_;
  memory::Pool* pool_ = nullptr;  // never destroyed: other threads may still free while the process exits
  std::map<CUdeviceptr, Entry> blocks_;
};

}  // namespace cudasched::runtime
