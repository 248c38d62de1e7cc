// The memory that PyTorch's allocator holds, by class, region and stream: counted from the records of the allocator's
// trace, beginning with a snapshot. Pure: no PyTorch, no CUDA, no thread and no clock of its own. The caller holds a
// lock.
//
// `requested` is the memory that tensors asked for, as the allocator's statistic of that name. A block counts until its
// free is complete, after the work of all streams recorded for the block. `reserved` is the memory that the allocator
// has from the driver.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <unordered_map>

#include "torch/timeline.hpp"

namespace cudasched::torch_memory {

// The region of a thread that was told of none, as autograd's: an allocation is of the stream's last region.
constexpr std::uint32_t kUntold = ~std::uint32_t{0};

enum class Action : std::uint8_t { kAllocate, kFree, kReserve, kRelease, kSnapshot };

struct Record {
  Action action;
  std::int8_t device;
  std::uint8_t client_class;  // as in cudasched/engine.h; of the allocating thread
  std::uint32_t region;       // its number; 0: none; or kUntold
  std::uint64_t address;
  std::uint64_t bytes;
  std::uint64_t stream;
  std::int64_t time_ns = 0;  // CLOCK_MONOTONIC; 0: not known, and the record is not in the timeline
};

struct Amount {
  std::uint64_t bytes = 0;
  std::uint64_t peak = 0;

  void add(std::uint64_t more) {
    bytes += more;
    peak = std::max(peak, bytes);
  }
  void take(std::uint64_t less) { bytes -= std::min(bytes, less); }
};

class Device {
 public:
  static constexpr std::size_t kClasses = 3;

  // Before the first record, and for blocks of the snapshot: of class normal, or of their stream's class.
  void begin_with(std::uint64_t address, std::uint64_t bytes, std::uint64_t stream) {
    allocate({Action::kAllocate, 0, 0, 0, address, bytes, stream, 0});
  }
  void begin_with_reserved(std::uint64_t bytes) { reserved.add(bytes); }

  // A stream of a class of its own: allocations on the stream are of that class, for all threads.
  void name_stream(std::uint64_t stream, std::uint8_t client_class) {
    named_streams_[stream].client_class = client_class;
  }

  // The most that a region should hold, 0: no limit. Beyond the limit nothing fails; each crossing counts.
  void limit(std::uint32_t region, std::uint64_t bytes) { limits_[region].bytes = bytes; }
  std::uint64_t over_limit(std::uint32_t region) const {
    const auto found = limits_.find(region);
    return found == limits_.end() ? 0 : found->second.times;
  }

  // Records before the snapshot's own record are part of the snapshot.
  void apply(const Record& record) {
    if (record.action == Action::kSnapshot) {
      begun_ = true;
      return;
    }
    if (!begun_) return;
    switch (record.action) {
      case Action::kAllocate:
        allocate(record);
        break;
      case Action::kFree:
        free(record);
        break;
      case Action::kReserve:
        reserved.add(record.bytes);
        break;
      case Action::kRelease:
        reserved.take(record.bytes);
        break;
      case Action::kSnapshot:
        break;
    }
    if (record.time_ns != 0) note(record.time_ns);
  }

  Amount requested;
  Amount reserved;
  std::array<Amount, kClasses> by_class;
  std::map<std::uint64_t, Amount> by_stream;
  std::map<std::uint32_t, Amount> by_region;
  Timeline timeline;
  std::uint64_t unknown_frees = 0;  // of blocks that no record told of: some were lost

 private:
  struct Block {
    std::uint64_t bytes;
    std::uint64_t stream;
    std::uint32_t region;
    std::uint8_t client_class;
  };

  void allocate(const Record& record) {
    Named owner{record.client_class, 0};
    if (const auto named = named_streams_.find(record.stream); named != named_streams_.end()) {
      if (record.region != kUntold) named->second.region = record.region;
      owner = named->second;
    } else if (record.region != kUntold) {
      owner.region = record.region;
    }
    const std::uint8_t client_class = owner.client_class < kClasses ? owner.client_class : std::uint8_t{0};
    const auto [place, is_new] =
        blocks_.try_emplace(record.address, Block{record.bytes, record.stream, owner.region, client_class});
    if (!is_new) return;
    requested.add(record.bytes);
    by_class[client_class].add(record.bytes);
    by_stream[record.stream].add(record.bytes);
    Amount& of_region = by_region[owner.region];
    of_region.add(record.bytes);
    if (const auto limit = limits_.find(owner.region); limit != limits_.end()) {
      const std::uint64_t most = limit->second.bytes;
      if (most != 0 && of_region.bytes > most && of_region.bytes - record.bytes <= most) ++limit->second.times;
    }
    count(place->second, true);
  }

  void free(const Record& record) {
    const auto found = blocks_.find(record.address);
    if (found == blocks_.end()) {
      ++unknown_frees;
      return;
    }
    const Block& block = found->second;
    requested.take(block.bytes);
    by_class[block.client_class].take(block.bytes);
    by_stream[block.stream].take(block.bytes);
    by_region[block.region].take(block.bytes);
    count(block, false);
    blocks_.erase(found);
  }

  void note(std::int64_t time_ns) { timeline.add({time_ns, reserved.bytes, held_by_class_, held_by_region_}); }
  void count(const Block& block, bool there) {
    std::uint64_t& of_class = held_by_class_[block.client_class];
    std::uint64_t& of_region = held_by_region_[Timeline::place_of(block.region)];
    of_class = there ? of_class + block.bytes : of_class - std::min(of_class, block.bytes);
    of_region = there ? of_region + block.bytes : of_region - std::min(of_region, block.bytes);
  }

  struct Named {
    std::uint8_t client_class = 0;
    std::uint32_t region = 0;  // that allocated there last
  };

  struct Limit {
    std::uint64_t bytes = 0;
    std::uint64_t times = 0;
  };

  bool begun_ = false;
  std::unordered_map<std::uint32_t, Limit> limits_;
  std::array<std::uint64_t, Timeline::kClasses> held_by_class_{};
  std::array<std::uint64_t, Timeline::kRegions> held_by_region_{};
  std::unordered_map<std::uint64_t, Block> blocks_;
  std::unordered_map<std::uint64_t, Named> named_streams_;
};

}  // namespace cudasched::torch_memory
