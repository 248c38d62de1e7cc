// One simulated device in a file that all processes of a directory share: the model, its lock, and the contexts of
// living processes. Knows nothing of the driver API.
//
// The lock is a robust process-shared mutex; a process killed inside it leaves a model that Device::rebuild mends. A
// context belongs to the process that holds the POSIX record lock on its slot's byte: gone with the process, not
// inherited by fork. Such locks fall when the process closes any descriptor of the file, so the file is opened once and
// kept. The first process to open the file while no other has it open starts with an empty device.
#pragma once

#include <pthread.h>

#include <array>
#include <bitset>
#include <cstdint>
#include <string>

#include "simulate/device.hpp"

namespace cudasched::simulated_driver {

// The device inside the file.
using simulate::Completion;
using simulate::Device;
using simulate::kContextCount;
using simulate::kMaxBlocksPerSm;
using simulate::kMaxDurationNs;
using simulate::kNever;
using simulate::kOpsPerContext;
using simulate::kSmCount;
using simulate::OpKind;
using simulate::Status;
using simulate::Ticket;
using simulate::Work;

class SharedDevice {
 public:
  // 0, or an errno: the directory belongs to another user or cannot be made, no space, the file is in use with another
  // layout (EPROTO). `memory_bytes`: of the device; of the first process that opens it.
  int open(const std::string& directory, int ordinal, double scale,
           std::uint64_t memory_bytes = std::uint64_t{64} << 30);

  // Holds the lock; on the way in dead contexts are removed (at most once a millisecond) and the model runs up to now.
  class Guard {
   public:
    explicit Guard(SharedDevice& shared) noexcept : shared_(shared) { shared_.lock(); }
    ~Guard() { shared_.unlock(); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    Device& operator*() const noexcept { return shared_.layout_->device; }
    Device* operator->() const noexcept { return &shared_.layout_->device; }

   private:
    SharedDevice& shared_;
  };

  // With the lock held (as the Guard proves): a context that lives as long as this process, or until it is destroyed.
  Status create_context(Guard& guard, int* context) noexcept;
  void destroy_context(Guard& guard, int context) noexcept;

  // Memory of the device, which a context holds until give_memory_back or its end. False: too little is free.
  bool take_memory(Guard& guard, int context, std::uint64_t bytes) noexcept;
  void give_memory_back(Guard& guard, int context, std::uint64_t bytes) noexcept;
  std::uint64_t free_memory(Guard& guard) const noexcept;
  std::uint64_t memory_bytes() const noexcept { return layout_->memory_bytes; }

  std::int64_t to_real_ns(std::int64_t simulated_ns) const noexcept;
  std::int64_t simulated_now_ns() const noexcept;

 private:
  struct Layout {
    std::uint64_t magic;  // written last
    std::uint32_t version;
    std::uint32_t bytes;
    double scale;
    std::int64_t epoch_real_ns;
    std::int64_t last_reap_real_ns;
    pthread_mutex_t mutex;
    std::uint64_t memory_bytes;
    std::array<std::uint64_t, kContextCount> held_bytes;  // by context
    Device device;
  };

  int initialize(double scale, std::uint64_t memory_bytes) noexcept;
  void lock() noexcept;
  void unlock() noexcept;
  void reap() noexcept;
  bool byte_locked_elsewhere(std::int64_t byte) const noexcept;
  int lock_byte(std::int64_t byte, short type, bool wait) const noexcept;

  int descriptor_ = -1;
  Layout* layout_ = nullptr;
  std::bitset<kContextCount> own_;
};

}  // namespace cudasched::simulated_driver
