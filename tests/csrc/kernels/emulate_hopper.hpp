// The functions of csrc/kernels/hopper.cuh on the host. Included by it, after emulate.hpp and mma.cuh: compile with
// -DEMULATED_HOPPER='"emulate_hopper.hpp"'.
//
// Addresses of shared memory are as on the device: dynamic shared memory of a block begins at an address of 16 bytes'
// alignment alone, descriptors are taken apart into what the PTX ISA says they hold, and the swizzle is applied to the
// whole address. A load by TMA is done at once where `eager_copies` is set, else when nothing else can go on; products
// and stores read shared memory at once where `eager_reads` is set, else at the wait for them. So a kernel that does
// not wait long enough for what it reads, or frees or overwrites it too early, computes something else in one of the
// ways.
//
// Not emulated: the fences between the generic and the asynchronous proxy (a missing one does not show), registers
// taken and given, and that wgmma needs its sums left alone until it is waited for.
#pragma once

#include <map>

namespace emulate {

constexpr unsigned kSharedBase = 0x420;
inline bool eager_reads = false;

// A tensor map in the words of a TensorMap.
struct Map {
  char* address;
  long long columns, rows;
  int element_bytes, box_columns, box_rows;
};

struct Phases {
  unsigned count = 0;
  int pending = 0;
  long bytes = 0;
  unsigned phase = 0;
  bool made = false;
};
inline std::map<const void*, Phases> phases;
inline std::deque<std::function<void()>> loads;
inline std::array<std::deque<std::vector<std::function<void()>>>, 2048> products, stores;
inline std::map<std::pair<unsigned, int>, std::pair<int, unsigned>> meetings;  // block and barrier: arrived, generation

inline bool load_next() {
  if (loads.empty()) return false;
  const auto load = std::move(loads.front());
  loads.pop_front();
  load();
  return true;
}

inline char* shared_begin(unsigned rank) {
  return reinterpret_cast<char*>(dynamic_shared.data() + rank * shared_quads);
}
inline unsigned own_rank() { return running / block_size.x; }

inline void complete(const void* barrier) {
  Phases& at = phases[barrier];
  require(at.made, "a barrier is used that was not initialised");
  require(at.pending >= 0, "more arrivals at a barrier than it counts");
  if (at.pending != 0 || at.bytes != 0) return;
  at.phase ^= 1u;
  at.pending = static_cast<int>(at.count);
}

inline void arrive(const void* barrier, long bytes) {
  Phases& at = phases[barrier];
  at.bytes += bytes;
  --at.pending;
  complete(barrier);
}

template <typename Queue>
void run_but(Queue& groups, std::size_t open) {
  while (groups.size() > open + 1) {
    for (const auto& one : groups.front()) one();
    groups.pop_front();
  }
}

template <typename Queue>
void begin(Queue& queue, std::function<void()> what) {
  if (eager_reads) return what();
  if (queue.empty()) queue.emplace_back();
  queue.back().push_back(std::move(what));
}

// The place of (line, depth) that a descriptor gives, where `line` is along m or n.
inline unsigned place_of(unsigned long long descriptor, int line, int depth, bool by_lines) {
  const auto field = [&](int shift) { return static_cast<unsigned>(descriptor >> shift & 0x3fffu) << 4; };
  require(descriptor >> 62 == 1, "a descriptor without the 128-byte swizzle");
  require((descriptor >> 49 & 7u) == 0, "a descriptor with a base offset");
  const unsigned begin = field(0), leading = field(16), stride = field(32);
  const auto l = static_cast<unsigned>(line), d = static_cast<unsigned>(depth);
  unsigned offset = 0;
  if (by_lines) {  // chunks of 8 elements: ((8, n), (8, k)) : ((1, leading), (8, stride))
    offset = l % 8 * 2 + l / 8 % 8 * 16 + l / 64 * leading + d % 8 * 128 + d / 8 * stride;
  } else {  // ((8, m), 2) : ((8, stride), 1)
    offset = l % 8 * 128 + l / 8 * stride + d * 2;
  }
  const unsigned address = begin + offset;
  return address ^ (address >> 7 & 7u) << 4;
}

inline unsigned short element_at(unsigned address, unsigned rank) {
  unsigned short bits;
  const std::size_t place = address - kSharedBase;
  require(address >= kSharedBase && place + 2 <= shared_quads * sizeof(float4), "a descriptor beyond shared memory");
  std::memcpy(&bits, shared_begin(rank) + place, 2);
  return bits;
}

}  // namespace emulate

namespace cudasched::kernels {

using Barrier = unsigned long long;

inline unsigned shared_address(const void* shared) {
  const auto offset = static_cast<const char*>(shared) - emulate::shared_begin(emulate::own_rank());
  emulate::require(offset >= 0 && offset <= static_cast<long>(emulate::shared_quads * sizeof(float4)),
                   "an address that is not in the block's dynamic shared memory");
  return emulate::kSharedBase + static_cast<unsigned>(offset);
}

namespace emulated {

inline void* remote(const void* shared, unsigned rank) {
  const auto begin = emulate::fibers.begin() + rank * emulate::block_size.x;
  const bool gone = std::all_of(begin, begin + emulate::block_size.x, [](const auto& fiber) { return fiber.done; });
  emulate::require(!gone, "the shared memory of a block of the cluster that has ended");
  return emulate::shared_begin(rank) + (shared_address(shared) - emulate::kSharedBase);
}

inline emulate::Map map_of(const TensorMap& map) {
  emulate::Map made;
  std::memcpy(&made, &map, sizeof made);
  return made;
}

// Calls visit(shared, global, bytes or 0 beyond the array) for each chunk of a box.
template <typename Visit>
void each_chunk(const emulate::Map& map, char* shared, unsigned address, int column, int row, Visit&& visit) {
  emulate::require(address % 128 == 0, "a box that does not begin at a multiple of 128 bytes");
  emulate::require(map.box_columns * map.element_bytes == 128 && map.box_rows <= 256, "a box that TMA does not take");
  emulate::require(map.columns * map.element_bytes % 16 == 0, "rows that are no multiples of 16 bytes");
  for (int r = 0; r < map.box_rows; ++r) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      const unsigned offset = static_cast<unsigned>(r * 128 + chunk * 16);
      const unsigned place = (address + offset) ^ ((address + offset) >> 7 & 7u) << 4;
      const long long from_column = column + chunk * 16 / map.element_bytes;
      const long long from_row = row + r;
      const bool inside = from_row >= 0 && from_row < map.rows && from_column >= 0 && from_column < map.columns;
      const long long left = (map.columns - from_column) * map.element_bytes;
      char* global = map.address + (from_row * map.columns + from_column) * map.element_bytes;
      visit(shared + (static_cast<long>(place) - static_cast<long>(address)), global,
            inside ? static_cast<std::size_t>(std::min(left, 16LL)) : 0);
    }
  }
}

}  // namespace emulated

inline void initialise_barrier(Barrier* barrier, unsigned count) {
  emulate::require(emulate::is_aligned(barrier, 8), "a barrier that is not aligned");
  emulate::phases[barrier] = {count, static_cast<int>(count), 0, 0, true};
  emulate::when_all_wait = emulate::load_next;
}
inline void publish_barriers() {}
inline void arrive_expecting(Barrier* barrier, unsigned bytes) { emulate::arrive(barrier, bytes); }
inline void arrive(Barrier* barrier) { emulate::arrive(barrier, 0); }
inline void arrive_at(Barrier* barrier, unsigned rank) { emulate::arrive(emulated::remote(barrier, rank), 0); }
inline void wait_for(Barrier* barrier, unsigned parity) {
  emulate::require(emulate::phases[barrier].made, "a barrier is waited for that was not initialised");
  emulate::wait_until([=] { return emulate::phases[barrier].phase != parity; });
}

inline void load_box_everywhere(void* shared, const TensorMap& map, Barrier* barrier, int column, int row,
                                unsigned short blocks) {
  const unsigned address = shared_address(shared);
  std::vector<std::pair<char*, Barrier*>> to;
  for (unsigned rank = 0; rank < 16; ++rank) {
    if (blocks >> rank & 1u) {
      to.emplace_back(static_cast<char*>(emulated::remote(shared, rank)),
                      static_cast<Barrier*>(emulated::remote(barrier, rank)));
    }
  }
  const auto load = [=, made = emulated::map_of(map)] {
    for (const auto& [target, counts] : to) {
      long bytes = 0;
      emulated::each_chunk(made, target, address, column, row, [&](char* chunk, const char* global, std::size_t valid) {
        if (valid) std::memcpy(chunk, global, valid);
        std::memset(chunk + valid, 0, 16 - valid);
        bytes += 16;
      });
      emulate::phases[counts].bytes -= bytes;
      emulate::complete(counts);
    }
  };
  if (emulate::eager_copies) return load();
  emulate::loads.emplace_back(load);
}
inline void load_box(void* shared, const TensorMap& map, Barrier* barrier, int column, int row) {
  load_box_everywhere(shared, map, barrier, column, row, static_cast<unsigned short>(1u << emulate::own_rank()));
}
inline void prefetch(const TensorMap&) {}

inline void store_box(const TensorMap& map, const void* shared, int column, int row) {
  const unsigned address = shared_address(shared);
  char* from = const_cast<char*>(static_cast<const char*>(shared));
  emulate::begin(emulate::stores[emulate::running], [=, made = emulated::map_of(map)] {
    emulated::each_chunk(made, from, address, column, row, [&](const char* chunk, char* global, std::size_t valid) {
      if (valid) std::memcpy(global, chunk, valid);
    });
  });
}
inline void commit_stores() { emulate::stores[emulate::running].emplace_back(); }
template <int Groups>
void wait_for_stores() {
  emulate::run_but(emulate::stores[emulate::running], Groups);
}
inline void publish_to_tma() {}

inline void store_matrix_x4(void* shared, const unsigned (&registers)[4]) {
  const unsigned lane = emulate::running % 32;
  emulate::require(emulate::is_aligned(shared, 16), "a row of stmatrix is not aligned");
  emulate::meet(shared, [&](auto&& offer) {
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      unsigned banks = 0;
      for (unsigned row = 0; row < 8; ++row) {
        banks |= 1u << reinterpret_cast<std::uintptr_t>(offer(8 * matrix + row)) / 16 % 8;
      }
      if (lane == 0 && banks != 0xffu) ++emulate::bank_conflicts;
      char* row = static_cast<char*>(const_cast<void*>(offer(8 * matrix + lane / 4)));
      std::memcpy(row + 4 * (lane % 4), &registers[matrix], 4);
    }
  });
}

inline void meet_at(int barrier, int threads) {
  auto& at = emulate::meetings[{emulate::own_rank(), barrier}];
  const unsigned generation = at.second;
  if (++at.first == threads) {
    at.first = 0;
    ++at.second;
    return;
  }
  emulate::wait_until([&at, generation] { return at.second != generation; });
}

template <int Registers>
void take_registers() {}
template <int Registers>
void give_registers() {}

inline unsigned cluster_rank() { return emulate::own_rank(); }
inline void meet_in_cluster() { emulate::wait(4); }

inline void begin_products() {}
inline void commit_products() { emulate::products[emulate::running].emplace_back(); }
template <int Groups>
void wait_for_products() {
  emulate::run_but(emulate::products[emulate::running], Groups);
}
template <int Count>
void hold(float (&)[Count]) {}

template <int Count, typename Type>
void multiply_group(float (&d)[Count], unsigned long long a, unsigned long long b, int accumulate, Type) {
  static_assert(Count == 32 || Count == 64 || Count == 96 || Count == 128, "the shapes that there are");
  const int lane = static_cast<int>(emulate::running % 32);
  const int warp = static_cast<int>(emulate::running / 32 % 4);
  const unsigned rank = emulate::own_rank();
  emulate::begin(emulate::products[emulate::running], [=, &d] {
    float rows[2][16];
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < 16; ++k) {
        const unsigned place = emulate::place_of(a, 16 * warp + lane / 4 + 8 * half, k, false);
        rows[half][k] = emulated::value_of(emulate::element_at(place, rank), 0, Type{});
      }
    }
    for (int j = 0; j < Count / 4; ++j) {
      for (int odd = 0; odd < 2; ++odd) {
        double sums[2] = {};
        for (int k = 0; k < 16; ++k) {
          const unsigned place = emulate::place_of(b, 8 * j + 2 * (lane % 4) + odd, k, true);
          const float value = emulated::value_of(emulate::element_at(place, rank), 0, Type{});
          for (int half = 0; half < 2; ++half) sums[half] += static_cast<double>(rows[half][k]) * value;
        }
        for (int half = 0; half < 2; ++half) {
          float& sum = d[4 * j + 2 * half + odd];
          sum = static_cast<float>((accumulate ? static_cast<double>(sum) : 0.0) + sums[half]);
        }
      }
    }
  });
}

}  // namespace cudasched::kernels

namespace emulate {

// As cuTensorMapEncodeTiled makes it of a dense array of `rows` x `columns`, in boxes of 128 bytes x `box_rows`.
inline cudasched::kernels::TensorMap encode(const void* array, long long rows, long long columns, int element_bytes,
                                            int box_rows) {
  const Map map{
      static_cast<char*>(const_cast<void*>(array)), columns, rows, element_bytes, 128 / element_bytes, box_rows};
  cudasched::kernels::TensorMap made = {};
  static_assert(sizeof map <= sizeof made);
  std::memcpy(&made, &map, sizeof map);
  return made;
}

}  // namespace emulate
