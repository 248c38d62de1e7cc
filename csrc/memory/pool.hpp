// A pool of GPU memory that defragments itself by virtual memory: the layout's plans (layout.hpp), carried out by the
// driver. For programs that ask for it; the hook knows of it as of any program's memory.
//
// Sizes are bytes; an address is 512-byte aligned, and page-aligned where the size is whole pages. A block freed on a
// stream answers the next allocation of its size on that stream at once, without a call that changes a mapping. Another
// stream uses free memory, and the pool moves it, only after the work that was on the freeing stream at the free:
// PyTorch's and RMM's rule. As with cudaFreeAsync, free() names a stream that is behind all use of the block and behind
// its allocation. An allocation on a capturing stream takes memory that no work uses, because a graph runs on any
// stream.
//
// Where free memory would do that work still uses, an allocation waits for it on the host rather than take more of the
// GPU. Moving memory waits for nothing else: mapping and unmapping pass by running kernels.
//
// Throws DriverError, PoolError and OutOfMemoryError, and then nothing is lost: a chunk that a failed call leaves
// unmapped is kept. Threads: any; one lock, held over driver calls but not while it waits. Forks: every call of a child
// throws. The driver's table is loaded before (driver.hpp).
#pragma once

#include <cuda.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.hpp"
#include "memory/layout.hpp"

namespace cudasched::memory {

// The pool was misused; the message says how.
class PoolError : public Error {
 public:
  using Error::Error;
};

// The limit or the GPU has no room for it; the message has the numbers.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

class Pool {
 public:
  static constexpr Bytes kChunkBytes = Bytes{32} << 20;

  struct Options {
    int device = 0;
    Bytes limit_bytes = 0;  // 0: as much as the GPU has. In whole pages of 2 MiB, rounded down.
    // The largest piece that moves as one. The driver makes memory accessible in 40 us a chunk and 2 us a MiB (H100).
    Bytes chunk_bytes = kChunkBytes;
  };

  // In the device's primary context, which lives as long as the pool. Throws DriverError, PoolError.
  explicit Pool(const Options& options);
  // Gives back all but blocks in use, which stay with the program.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  CUdeviceptr allocate(Bytes bytes, CUstream stream);
  void free(CUdeviceptr address, CUstream stream);
  // The same for memory that no work uses: before the block's first use, and after its last.
  CUdeviceptr allocate_idle(Bytes bytes);
  void free_idle(CUdeviceptr address);

  // Gives free chunks back until at most `keep` bytes are reserved, or none are free; waits for work that may use them.
  // Returns the bytes that went.
  Bytes trim(Bytes keep = 0);
  // Throws PoolError while blocks are in use. Once is enough, twice no error.
  void close();
  bool is_closed();

  Statistics statistics();
  // The same at once, for observers: nothing while another thread is at work on the pool; all zero once it is closed.
  std::optional<Statistics> look() noexcept;
  int device() const noexcept { return options_.device; }
  CUcontext context() const noexcept { return context_; }

 private:
  friend class Parking;  // moves chunks away and back
  using Lock = std::unique_lock<std::mutex>;

  Stream number_of(CUstream stream) const;
  void refuse_other_process() const;
  Lock lock();
  CUdeviceptr allocate_for(Bytes bytes, Stream stream);
  CUdeviceptr make_room(Lock& held, Bytes bytes, Stream stream);
  void free_from(CUdeviceptr address, Stream stream);
  void record(CUstream stream, Stream number);
  void poll();
  void wait(Lock& held);
  void release(const std::vector<Chunk>& chunks);
  bool carry_out(const Plan& plan);
  void map(const Plan& plan);
  void trim_to(Lock& held, Bytes keep);
  void give_all_back(Lock& held);
  [[noreturn]] void throw_out_of_memory(Bytes bytes, const char* whose);

  Options options_;
  CUcontext context_ = nullptr;
  CUdeviceptr base_ = 0;
  Bytes range_ = 0;
  unsigned forks_ = 0;  // of this process before it was made
  std::mutex mutex_;
  Layout layout_;
  std::unordered_map<Stream, CUevent> pending_;  // behind the latest free of each stream
  std::vector<CUevent> events_;                  // for others
  int waiting_ = 0;
  bool closed_ = false;
};

}  // namespace cudasched::memory
