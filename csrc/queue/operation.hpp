// A deferred driver call, with all that the launcher thread needs to make the call later as the program would have. The
// push copied the data behind the program's own pointers (parameters, attributes) into the ring's arena.
//
// Written by the pushing thread under the queue's lock, read by the launcher.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "predict/launch.hpp"

namespace cudasched::queue {

struct Operation {
  enum class Kind : std::uint8_t {
    kKernel,
    kGraph,
    kFill,
    kFillRows,
    kCopy,
    kRecord,
    kWait,
    kHostFunction,
    kDestroyEvent,
    kFreeMemory,
    kChange
  };
  enum class Direction : std::uint8_t { kAny, kToDevice, kToHost, kOnDevice };
  // Of copies in pieces, kToDevice and kToHost: the place in an array of both.
  static constexpr std::size_t place_of(Direction direction) noexcept { return direction == Direction::kToHost; }

  // A kernel or a graph: the fields of a Call (queue/call.hpp) that the gate and the driver need.
  struct Launch {
    predict::Launch what;
    CUlaunchAttribute* attributes = nullptr;
    unsigned attribute_count = 0;  // other than 0: by cuLaunchKernelEx
    bool cooperative = false;
    bool overlaps_predecessor = false;
  };
  // Memory set to a value; `rows` > 1 and `pitch_bytes` are for kFillRows.
  struct Fill {
    CUdeviceptr to;
    std::size_t pitch_bytes;
    std::size_t width;  // elements
    std::size_t rows;
    unsigned value;
    std::uint8_t element_bytes;  // 1, 2 or 4
  };
  // Host addresses stand in the same words as device addresses. Of a copy in pieces, the part that is not submitted
  // yet.
  struct Copy {
    CUdeviceptr to;
    CUdeviceptr from;
    std::size_t bytes;
    Direction direction;
  };
  struct Event {
    CUevent event;
    unsigned flags;
  };
  struct Host {
    CUhostFn function;
    void* data;
  };

  struct Memory {
    CUdeviceptr address;
  };
  // A change of an executable graph, for the graph's slices, behind its queued launches. The bytes describe the change
  // to the runtime, and are in the ring's arena.
  struct Change {
    CUgraphExec exec;
    std::byte* bytes;
  };

  Kind kind = Kind::kGraph;
  bool made = false;           // ahead of its turn, between two parts of an earlier one; the launcher's
  std::uint16_t region = 0;    // the pushing thread's, while a trace runs
  unsigned thread = 0;         // that pushed the call, and gets its error
  std::int64_t pushed_ns = 0;  // set where Launcher::is_timed()
  CUcontext context = nullptr;
  CUstream stream = nullptr;  // never 0 (CU_STREAM_LEGACY or a handle), but for calls of no stream
  union {
    Launch launch;
    Fill fill;
    Copy copy;
    Event event;
    Host host;
    Memory memory;
    Change change;
  };

  Operation() noexcept : memory{} {}
  Operation(Kind of, CUstream on, const Fill& what) noexcept : kind(of), stream(on), fill(what) {}
  Operation(Kind of, CUstream on, const Copy& what) noexcept : kind(of), stream(on), copy(what) {}
  Operation(Kind of, CUstream on, const Event& what) noexcept : kind(of), stream(on), event(what) {}
  Operation(Kind of, CUstream on, const Host& what) noexcept : kind(of), stream(on), host(what) {}
  Operation(Kind of, CUstream on, const Memory& what) noexcept : kind(of), stream(on), memory(what) {}

  // Launches wait at the gate; the rest follows in the ring's order.
  bool is_launch() const noexcept { return kind == Kind::kKernel || kind == Kind::kGraph; }

  // Of a graph launch.
  CUgraphExec graph() const noexcept { return static_cast<CUgraphExec>(const_cast<void*>(launch.what.function)); }

  // May start before the launch ahead of it on its stream has finished: an event between the two would end the overlap.
  bool overlaps_predecessor() const noexcept { return kind == Kind::kKernel && launch.overlaps_predecessor; }

  // Makes the call. `context` is current on the calling thread. Not noexcept: a callback of the driver's may end the
  // thread.
  CUresult execute() const;
};

// Errors after which every call in the context fails: CUDA reports such an error to the next call of any kind.
bool is_sticky(CUresult status) noexcept;

}  // namespace cudasched::queue
