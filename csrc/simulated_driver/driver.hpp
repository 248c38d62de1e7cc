// The objects of this process behind the driver's handles, and the submission and completion of work. One mutex, held
// through a Lock, guards all objects. The mutex is taken before a device's lock and never held while an effect runs or
// a thread sleeps. Entry points go through with_driver, which takes the mutex. The functions that it calls throw
// Refused where the driver returns an error.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "simulated_driver/commands.hpp"
#include "simulated_driver/graph.hpp"
#include "simulated_driver/image.hpp"
#include "simulated_driver/kill_at.hpp"
#include "simulated_driver/refused.hpp"
#include "simulated_driver/shared_device.hpp"

// Of cudaProfiler.h, which CUDA's header wheels leave out.
extern "C" {
CUresult CUDAAPI cuProfilerStart();
CUresult CUDAAPI cuProfilerStop();
}

namespace cudasched::simulated_driver {

using Lock = std::unique_lock<std::mutex>;

struct Capture;
struct Green;

// One record of an event.
struct Record {
  Context* context = nullptr;
  Ticket ticket = 0;
  bool done = false;
  std::int64_t finish_ns = 0;
};

enum class StreamKind { kOrdinary, kLegacy, kPerThread, kLane };

struct Stream {
  std::shared_ptr<Context> context;
  StreamKind kind = StreamKind::kOrdinary;
  int place = 0;  // in the model
  unsigned flags = 0;
  int priority = 0;
  std::uint64_t id = 0;
  const Green* green = nullptr;  // the stream's green context
  std::uint64_t submitted = 0;
  std::uint64_t applied = 0;
  bool closed = false;           // by the program; queued work still runs
  Ticket last = 0;               // operation
  Ticket last_legacy_wait = 0;   // of the legacy stream that this one has waited for
  Ticket legacy_waited_for = 0;  // operation of this stream that the legacy stream has waited for
  std::shared_ptr<Capture> capture;
  std::vector<Edge> capture_front;  // the dependencies of the next captured node

  bool blocking() const { return kind != StreamKind::kLane && (flags & CU_STREAM_NON_BLOCKING) == 0; }
};

struct Event {
  std::shared_ptr<Context> context;
  unsigned flags = 0;
  std::shared_ptr<Record> record;  // the latest
  std::shared_ptr<Capture> capture;
  std::vector<Edge> captured;
};

inline constexpr int kSharedBytesDefault = 48 * 1024;
inline constexpr int kSharedBytesOptIn = 227 * 1024;

struct Module;

struct Function {
  Module* module = nullptr;
  std::shared_ptr<const KernelSpec> spec;
  int dynamic_shared_bytes_max = kSharedBytesDefault;
  int carveout = -1;
  int non_portable_cluster = 0;
};

struct Module {
  std::shared_ptr<Context> context;
  std::vector<std::unique_ptr<Function>> functions;
};

struct Library;

struct Kernel {
  Library* library = nullptr;
  std::size_t index = 0;
  std::shared_ptr<const KernelSpec> spec;
};

struct Library {
  std::vector<std::shared_ptr<const KernelSpec>> specs;
  std::vector<std::unique_ptr<Kernel>> kernels;
  std::map<Context*, std::unique_ptr<Module>> modules;
};

struct Pending {
  std::shared_ptr<Stream> stream;
  Command command;
  std::shared_ptr<Record> record;
  std::shared_ptr<const void> keeps;  // until done
};

struct Context {
  int device = 0;
  int slot = -1;  // in the model; -1: not active
  bool primary = false;
  unsigned flags = 0;
  unsigned retained = 0;
  std::uint64_t id = 0;
  std::uint32_t group = 0;  // its channels' (resource_manager.hpp)
  CUresult sticky = CUDA_SUCCESS;
  std::shared_ptr<Stream> legacy;
  std::map<std::uint64_t, std::shared_ptr<Stream>> per_thread;
  std::unordered_map<Stream*, std::shared_ptr<Stream>> streams;  // all of them, lanes too
  std::vector<std::shared_ptr<Stream>> lanes;                    // that branches of graphs run on, used again
  std::vector<Pending> pending;                                  // by Device::op_index
};

struct Allocation {
  std::size_t bytes = 0;
  CUmemorytype type = CU_MEMORYTYPE_DEVICE;
  std::shared_ptr<Context> context;
  unsigned flags = 0;
  GraphMemory* graph_memory = nullptr;  // of the allocation node that owns and frees the memory
  bool of_pool = false;
  bool mapped = false;  // physical memory, whose neighbours continue it
};

// A handle of cuMemCreate.
struct PhysicalMemory {
  std::size_t bytes = 0;
  std::shared_ptr<Context> context;
  bool held = true;  // not released
  int mappings = 0;
  bool counts = true;       // in the context's memory; not where the context has ended since
  std::int64_t place = -1;  // in the file that has such memory; -1: not mapped yet
};

struct Applied {
  std::shared_ptr<Context> context;
  Pending pending;
  Completion completion;
};

// Behind a CUgraphConditionalHandle. Nodes of its graph, and of graphs inside it, go by its value.
struct Condition {
  const Graph* graph = nullptr;
  unsigned value = 0;
  unsigned default_value = 0;
  bool assigns_default = false;  // at each launch
  bool decides = false;          // a node has this condition; no other may
};

// SMs of a device, as a descriptor or a green context holds them.
struct SmPartition {
  unsigned sms = 0;
};

// The object's address, as a CUcontext, is the result of cuCtxFromGreenCtx: another name of the primary context.
struct Green {
  std::shared_ptr<Context> primary;
  SmPartition partition;
};

struct SimulatedGpu {
  SharedDevice shared;
  std::shared_ptr<Context> primary;
};

struct Driver {
  std::mutex mutex;
  bool initialized = false;
  double scale = 20;
  std::string directory;
  int mig = 0;
  int integrated = 0;
  std::vector<std::unique_ptr<SimulatedGpu>> gpus;
  std::uint64_t next_id = 1;
  std::unordered_map<Context*, std::shared_ptr<Context>> contexts;
  std::unordered_map<Stream*, std::shared_ptr<Stream>> streams;
  std::unordered_map<Event*, std::shared_ptr<Event>> events;
  std::unordered_map<Module*, std::unique_ptr<Module>> modules;
  std::unordered_map<Library*, std::unique_ptr<Library>> libraries;
  std::unordered_map<Function*, Function*> functions;
  std::unordered_map<Kernel*, Kernel*> kernels;
  std::unordered_map<Graph*, std::unique_ptr<Graph>> graphs;  // that belong to the program
  std::unordered_set<Graph*> graph_index;                     // child graphs and those being captured, too
  std::unordered_set<Node*> node_index;
  std::unordered_map<Exec*, std::shared_ptr<Exec>> execs;
  std::unordered_map<UserObject*, std::unique_ptr<UserObject>> user_objects;
  std::unordered_map<CUgraphConditionalHandle, Condition> conditions;
  std::vector<HostCommand> destructors;  // of user objects, that are due
  std::atomic<bool> destructors_due{false};
  std::unordered_map<SmPartition*, std::unique_ptr<SmPartition>> descriptors;
  std::unordered_map<Green*, std::unique_ptr<Green>> greens;
  std::vector<std::weak_ptr<Capture>> captures;
  std::map<std::uintptr_t, Allocation> allocations;  // by address
  std::map<CUmemGenericAllocationHandle, PhysicalMemory> physical;
  std::map<CUdeviceptr, CUmemGenericAllocationHandle> mappings;
  std::map<CUdeviceptr, std::size_t> ranges;  // of addresses that are reserved
  std::deque<Applied> completed;              // by the model, in order; effects still to come
  bool applying = false;                      // a thread is at it
  std::mutex submitting;                      // taken before `mutex`: whole submissions, one at a time
};

inline constexpr std::size_t kLargestBytes = std::size_t{64} << 30;  // of one allocation or fill
inline constexpr int kMemoryMiBDefault = 64 << 10;
inline constexpr int kMemoryMiBMax = 1 << 20;
inline constexpr int kGreatestPriority = -5;
inline constexpr std::size_t kExecBytes = 16 * 1024;  // of device memory that an executable graph takes,
inline constexpr std::size_t kExecNodeBytes = 1024;   // and a node of it

Driver& driver();

// The condition of every call: initialised, not a forked child, not from inside a host function.
CUresult may_call();
// Sets up forks, reads the environment and opens the devices.
CUresult initialize_driver();
// Works before initialisation too.
int driver_version();
// Of the calling thread; its default streams are closed when it ends.
std::uint64_t thread_id();

// Of the device's ordinal, else INVALID_DEVICE.
SimulatedGpu& gpu(CUdevice device);

std::vector<Context*>& context_stack();
std::shared_ptr<Context> current_context();
// The green context that is current to the calling thread, or null.
const Green* current_green();
// The context is there, and no operation of it has failed.
void require_sound(const Context& context);

void activate_context(Context& context);
// Waits for the context's work, then frees all its resources.
void deactivate_context(Lock& lock, const std::shared_ptr<Context>& context);
// The context's last user is gone.
void release_primary(Lock& lock, const std::shared_ptr<Context>& primary);

// Null: the context has as many as it may.
std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context>& context, StreamKind kind, unsigned flags,
                                    int priority);
// For the program.
CUstream open_stream(const std::shared_ptr<Context>& context, unsigned flags, int priority, const Green* green);
void close_stream(const std::shared_ptr<Stream>& stream);

// The stream behind a handle: null and CU_STREAM_LEGACY are the current context's legacy stream.
std::shared_ptr<Stream> find_stream(CUstream handle);
std::shared_ptr<Event> find_event(CUevent handle);
// A CUfunction, or a CUkernel cast to one (loaded into `context`).
Function& find_function(CUfunction handle, const std::shared_ptr<Context>& context);
Function& function_of(Kernel& kernel, const std::shared_ptr<Context>& context);
std::unique_ptr<Module> make_module(const std::shared_ptr<Context>& context,
                                    const std::vector<std::shared_ptr<const KernelSpec>>& specs);
// Their handles mean nothing any more.
void drop_functions(const Module& module);

CUstream per_thread(CUstream stream);

// A checked launch; the grid, block and shared memory of `config` count, its stream and attributes do not.
KernelCommand make_kernel_command(CUfunction handle, const std::shared_ptr<Context>& context,
                                  const CUlaunchConfig& config, void** params, void** extra, bool cooperative);

// Memory. An address inside an allocation finds that one; null if there is none, or if the allocation ends before
// `bytes`.
const Allocation* find_allocation(std::uintptr_t address, std::size_t bytes, std::uintptr_t* base = nullptr);
std::uintptr_t allocate(const std::shared_ptr<Context>& context, std::size_t bytes, CUmemorytype type, unsigned flags);
void release_memory(std::uintptr_t address);
// In a range of cuMemAddressReserve, whether or not anything is mapped there.
bool is_reserved(std::uintptr_t address, std::size_t bytes);
// Of the device, which all its processes share; without an address.
void take_device_memory(const Context& context, std::size_t bytes);
void give_device_memory_back(const Context& context, std::size_t bytes);
std::size_t free_device_memory(int device);

// Runs the model up to now and applies the completed operations (unless another thread is doing so).
void progress(Lock& lock);
// Until `done`; sleeps unlocked.
template <class Done>
void wait_until(Lock& lock, int device, Done done);
void sleep_until_next_event(Lock& lock, int device);

// Puts a command into a stream, after the waits that the default stream demands. The stream must not be capturing.
// Unlocks while the context's table is full. The mutex `submitting` must not be held by the caller.
void submit_command(Lock& lock, const std::shared_ptr<Stream>& stream, Command command,
                    std::shared_ptr<Record> record = nullptr, std::optional<int> priority = {});
void submit_wait(Lock& lock, const std::shared_ptr<Stream>& stream, const std::shared_ptr<Record>& record);
// A graph of more operations than the context's table holds goes in as room comes.
void submit_exec(Lock& lock, const std::shared_ptr<Stream>& stream, const std::shared_ptr<Exec>& exec);

// Destructors of user objects that have become due, on the calling thread, which must hold no lock.
void run_destructors();

void synchronize_stream(Lock& lock, const std::shared_ptr<Stream>& stream);
void synchronize_context(Lock& lock, const std::shared_ptr<Context>& context);
// As synchronize_context(), of a context that may have failed.
void settle(Lock& lock, const Context& context);
bool stream_idle(const Stream& stream);

template <class Done>
void wait_until(Lock& lock, int device, Done done) {
  for (progress(lock); !done(); progress(lock)) sleep_until_next_event(lock, device);
}

// The object behind a handle, in a table of the driver's.
template <class Table, class Handle>
auto& find(Table& table, Handle handle, CUresult otherwise = CUDA_ERROR_INVALID_HANDLE) {
  using Key = typename Table::key_type;
  const auto found = [&] {
    if constexpr (std::is_pointer_v<Key>) {
      return table.find(reinterpret_cast<Key>(handle));
    } else {
      return table.find(Key{handle});
    }
  }();
  require(found != table.end(), otherwise);
  return found->second;
}

// An entry point: call(lock), of which the result is returned; of none, success.
template <class F>
CUresult with_driver(F call) {
  const Steps steps;
  try {
    if (const CUresult result = may_call(); result != CUDA_SUCCESS) return result;
    CUresult result = CUDA_SUCCESS;
    try {
      Lock lock(driver().mutex);
      if constexpr (std::is_void_v<decltype(call(lock))>) {
        call(lock);
      } else {
        result = call(lock);
      }
    } catch (const Refused& refused) {
      result = refused.result;
    }
    run_destructors();
    return result;
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (const std::exception&) {
    return CUDA_ERROR_UNKNOWN;
  }
}

// An entry point that gives what read() returns.
template <class T, class F>
CUresult give(T* to, F read) {
  if (to == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_driver([&](Lock&) { *to = read(); });
}

}  // namespace cudasched::simulated_driver
