// The table of the driver's entry points, generated from entry_points.txt, which explains its columns and each
// function's treatment. Constant data; looked up when a program asks for a function, never on the launch path.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace cudasched::hook {

enum class Treatment : std::uint8_t {
  kDefer,   // into the ring where the rules allow it; else as kDrain, and a launch as kGate
  kGate,    // a launch that is never deferred: drained, then gated
  kDrain,   // waits until the ring has passed the operations that the call depends on
  kDirect,  // neither observes nor changes queued operations
};

// The operations that a call depends on.
enum class Scope : std::uint8_t {
  kNone,
  kStream,
  kEvent,
  kStreamAndEvent,
  kEvents,
  kContext,
  kMemory,
  kContextAndMemory,
  kPeers,  // the current context and two others
  kExec,
  kGraph,  // nothing, unless an executable graph may hold memory of its own
  kProcess
};

// A call's effect on the engine's knowledge.
enum class Meaning : std::uint8_t {
  kNone,
  kLaunch,
  kSynchronise,
  kQueryStream,
  kQueryEvent,
  kBeginCapture,
  kEndCapture,
  kDestroyStream,
  kCreateEvent,
  kShareEvent,
  kDestroyEvent,
  kDestroyContext,
  kInstantiate,
  kChangeExec,
  kDestroyExec,
  kSetFunction,   // (function, attribute, value)
  kSetKernel,     // (attribute, value, kernel, device)
  kSetFunctions,  // of all functions
  kAllocate,      // may find no memory while frees are queued
  kFree,
  kPeerAccess,  // the current context may use the memory of another
  kPoolAccess,
  kNamesMemory,  // of memory that may be away: asks about it, or has the driver ask
  kPinsMemory,   // other contexts or devices may use the memory from here on
};

// The places of arguments, from 0; -1: none, or not listed.
struct Arguments {
  std::int8_t stream = -1;
  std::int8_t event = -1;
  std::int8_t other = -1;  // a second event or context
  std::int8_t function = -1;
  std::int8_t kernel = -1;
  std::int8_t exec = -1;
  std::int8_t context = -1;
  std::int8_t memory = -1;
};

// One version of a function.
struct EntryPoint {
  std::string_view symbol;  // as exported; every view here ends in NUL
  std::string_view name;    // the name for cuGetProcAddress,
  int since;                // from this CUDA version on; 0: not known
  std::string_view alias;   // another name for the same function; empty: none
  int alias_since;
  std::string_view twin;  // the twin for the per-thread default stream, as exported; empty: none
  Treatment treatment;
  Scope scope;
  Meaning meaning;
  bool taken_over;  // csrc/hook has a function of this signature
  Arguments arguments;
};

// The table, sorted by symbol.
std::span<const EntryPoint> entry_points() noexcept;

// The newest CUDA version that the table knows.
extern const int kNewestVersion;

// cuGetProcAddress gives twins from this CUDA version on.
inline constexpr int kTwinsSince = 7000;

constexpr bool is_twin(std::string_view symbol) noexcept {
  return symbol.ends_with("_ptsz") || symbol.ends_with("_ptds");
}

// May a call use memory that a program has allocated, or ask about it? A function that the table does not know (null)
// may. A free passes: it waits for work, and memory that is away is freed once it is back
// (runtime/memory/pageable.hpp).
bool uses_memory(const EntryPoint* point) noexcept;

// By exported symbol, a twin's too; null: not listed.
const EntryPoint* find_symbol(std::string_view symbol) noexcept;

// The entry point of `name` for a program of this CUDA version; null: not listed.
const EntryPoint* find_version(std::string_view name, int cuda_version) noexcept;

}  // namespace cudasched::hook
