#include "telemetry/cupti.hpp"

#include <cupti.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <mutex>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "base/processor.hpp"

namespace cudasched::telemetry::cupti {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 18;  // a thousand kernels: delivered soon, never one by one
constexpr std::size_t kBufferAlignment = 8;

// The layouts of CUDA 11.8 to 13.0 agree on all that is read.
using Kernel = CUpti_ActivityKernel10;
using Graph = CUpti_ActivityGraphTrace;
template <typename Older>
constexpr bool kSameKernel =
    offsetof(Older, start) == offsetof(Kernel, start) && offsetof(Older, end) == offsetof(Kernel, end) &&
    offsetof(Older, deviceId) == offsetof(Kernel, deviceId) &&
    offsetof(Older, streamId) == offsetof(Kernel, streamId) && offsetof(Older, gridX) == offsetof(Kernel, gridX) &&
    offsetof(Older, blockZ) == offsetof(Kernel, blockZ) &&
    offsetof(Older, correlationId) == offsetof(Kernel, correlationId) &&
    offsetof(Older, name) == offsetof(Kernel, name);
static_assert(kSameKernel<CUpti_ActivityKernel7> && kSameKernel<CUpti_ActivityKernel8> &&
              kSameKernel<CUpti_ActivityKernel9>);
static_assert(offsetof(CUpti_ActivityGraphTrace2, start) == offsetof(Graph, start) &&
              offsetof(CUpti_ActivityGraphTrace2, end) == offsetof(Graph, end) &&
              offsetof(CUpti_ActivityGraphTrace2, deviceId) == offsetof(Graph, deviceId) &&
              offsetof(CUpti_ActivityGraphTrace2, graphId) == offsetof(Graph, graphId) &&
              offsetof(CUpti_ActivityGraphTrace2, streamId) == offsetof(Graph, streamId));

// CUPTI precedes the record of a driver call with the launch that was pushed around it, where that call is recorded.
constexpr std::array kLaunchCalls{
    CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel,
    CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel_ptsz,
    CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch,
    CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch_ptsz,
};

struct Library {
  decltype(cuptiGetVersion)* get_version = nullptr;
  decltype(cuptiGetResultString)* result_string = nullptr;
  decltype(cuptiGetTimestamp)* get_timestamp = nullptr;
  decltype(cuptiSubscribe)* subscribe = nullptr;
  decltype(cuptiUnsubscribe)* unsubscribe = nullptr;
  decltype(cuptiActivityRegisterCallbacks)* register_callbacks = nullptr;
  decltype(cuptiActivityEnable)* enable = nullptr;
  decltype(cuptiActivityDisable)* disable = nullptr;
  decltype(cuptiActivityEnableDriverApi)* enable_driver_call = nullptr;  // 12.4 and later
  decltype(cuptiActivityFlushAll)* flush_all = nullptr;
  decltype(cuptiActivityGetNextRecord)* next_record = nullptr;
  decltype(cuptiActivityGetNumDroppedRecords)* dropped = nullptr;
  decltype(cuptiActivityPushExternalCorrelationId)* push = nullptr;
  decltype(cuptiActivityPopExternalCorrelationId)* pop = nullptr;
};

constinit Library library;
constinit std::mutex session_mutex;
constinit std::atomic<std::uint32_t> library_version{0};
constinit std::atomic<bool> counts{false};
constinit std::atomic<bool> times{false};
constinit std::atomic<Deliver> deliver_to{nullptr};
constinit std::atomic<std::uint64_t> ran{0};
constinit std::atomic<std::uint64_t> lost{0};
CUpti_SubscriberHandle subscriber = nullptr;

std::string text_of(CUptiResult result) {
  const char* text = nullptr;
  if (library.result_string(result, &text) != CUPTI_SUCCESS || text == nullptr) return "an unknown result";
  return text;
}

void check(CUptiResult result, const char* call) {
  if (result == CUPTI_SUCCESS) return;
  throw Error(std::string("launches on the device cannot be observed: ") + call + " gave " + text_of(result) +
              "; if another profiler runs in this program, stop it");
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* bytes, std::size_t* most_records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(kBufferAlignment, kBufferBytes));
  *bytes = *buffer == nullptr ? 0 : kBufferBytes;
  *most_records = 0;
}

DeviceRecord read(const Kernel& kernel) {
  DeviceRecord record;
  record.start = kernel.start;
  record.end = kernel.end;
  record.name_hash = kernel.name == nullptr ? 0 : hash_of(kernel.name);
  record.correlation = kernel.correlationId;
  record.device = kernel.deviceId;
  record.stream = kernel.streamId;
  const std::array grid{kernel.gridX, kernel.gridY, kernel.gridZ};
  const std::array block{kernel.blockX, kernel.blockY, kernel.blockZ};
  for (std::size_t i = 0; i < 3; ++i) {
    record.grid[i] = static_cast<std::uint32_t>(grid[i]);
    record.block[i] = static_cast<std::uint32_t>(block[i]);
  }
  return record;
}

DeviceRecord read(const Graph& graph) {
  DeviceRecord record;
  record.is_graph = true;
  record.start = graph.start;
  record.end = graph.end;
  record.correlation = graph.correlationId;
  record.device = graph.deviceId;
  record.stream = graph.streamId;
  record.graph = graph.graphId;
  return record;
}

void count() noexcept {
  if (counts.load(std::memory_order_relaxed)) ran.fetch_add(1, std::memory_order_relaxed);
}

void read_buffer(std::uint8_t* buffer, std::size_t valid_bytes, Batch* batch) {
  CUpti_Activity* record = nullptr;
  while (library.next_record(buffer, valid_bytes, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      count();
      if (batch != nullptr) batch->records.push_back(read(*reinterpret_cast<const Kernel*>(record)));
    } else if (record->kind == CUPTI_ACTIVITY_KIND_GRAPH_TRACE) {
      // With graph-level tracing a graph launch is one record, and the kernels inside it have none.
      count();
      if (batch != nullptr) batch->records.push_back(read(*reinterpret_cast<const Graph*>(record)));
    } else if (record->kind == CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION && batch != nullptr) {
      const auto& external = *reinterpret_cast<const CUpti_ActivityExternalCorrelation*>(record);
      if (external.externalKind == CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0) {
        batch->correlations.push_back({external.correlationId, external.externalId});
      }
    }
  }
}

void CUPTIAPI take_buffer(CUcontext context, std::uint32_t stream, std::uint8_t* buffer, std::size_t,
                          std::size_t valid_bytes) {
  const Deliver deliver = deliver_to.load(std::memory_order_acquire);
  try {
    Batch batch;
    if (valid_bytes > 0) read_buffer(buffer, valid_bytes, deliver == nullptr ? nullptr : &batch);
    if (deliver != nullptr) deliver(std::move(batch));
  } catch (const std::exception&) {  // out of memory: launches in the rest of the buffer stay untimed
    lost.fetch_add(1, std::memory_order_relaxed);
  }
  std::size_t dropped = 0;
  if (library.dropped(context, stream, &dropped) == CUPTI_SUCCESS) {
    lost.fetch_add(dropped, std::memory_order_relaxed);
  }
  std::free(buffer);
}

// Nothing is subscribed to: only one can hold the subscription.
void CUPTIAPI ignore(void*, CUpti_CallbackDomain, CUpti_CallbackId, const void*) {}

void* open_library(const std::string& path) {
  // A loaded libcupti of any version comes first: two in one process would fight over the one subscription.
  for (const char* name : {"libcupti.so.13", "libcupti.so.12", "libcupti.so"}) {
    if (void* loaded = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  }
  std::vector<std::string> candidates;
  if (!path.empty()) candidates.push_back(path);
  candidates.insert(
      candidates.end(),
      {"libcupti.so.13", "libcupti.so.12", "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13",
       "/usr/local/cuda/lib64/libcupti.so.13", std::string("/usr/local/cuda/") + kToolkitTarget + "/libcupti.so.13"});
  std::string why;
  for (const std::string& candidate : candidates) {
    if (void* handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    if (why.empty()) why = dlerror();
  }
  throw Error("launches on the device cannot be observed: no CUPTI library could be opened (" + why +
              "); install it with `pip install nvidia-cuda-cupti` or name it in CUDASCHED_CUPTI");
}

template <typename Function>
void find(void* handle, Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(dlsym(handle, name));
  if (function == nullptr) {
    throw Error(std::string("launches on the device cannot be observed: libcupti has no ") + name +
                "; it is too old, CUDA 11.8 or later is needed");
  }
}

void open(const std::string& path) {
  if (library_version.load() != 0) return;
  void* const handle = open_library(path);
  Library found;
  find(handle, found.get_version, "cuptiGetVersion");
  find(handle, found.result_string, "cuptiGetResultString");
  find(handle, found.get_timestamp, "cuptiGetTimestamp");
  find(handle, found.subscribe, "cuptiSubscribe");
  find(handle, found.unsubscribe, "cuptiUnsubscribe");
  find(handle, found.register_callbacks, "cuptiActivityRegisterCallbacks");
  find(handle, found.enable, "cuptiActivityEnable");
  find(handle, found.disable, "cuptiActivityDisable");
  find(handle, found.flush_all, "cuptiActivityFlushAll");
  find(handle, found.next_record, "cuptiActivityGetNextRecord");
  find(handle, found.dropped, "cuptiActivityGetNumDroppedRecords");
  find(handle, found.push, "cuptiActivityPushExternalCorrelationId");
  find(handle, found.pop, "cuptiActivityPopExternalCorrelationId");
  found.enable_driver_call =
      reinterpret_cast<decltype(found.enable_driver_call)>(dlsym(handle, "cuptiActivityEnableDriverApi"));
  std::uint32_t number = 0;
  if (found.get_version(&number) != CUPTI_SUCCESS) number = 0;
  if (number < kLeastVersion) {
    throw Error("launches on the device cannot be observed: this libcupti is of API version " + std::to_string(number) +
                ", and " + std::to_string(kLeastVersion) +
                " (CUDA 11.8) is the least; install a newer one with `pip install nvidia-cuda-cupti`");
  }
  library = found;
  library_version.store(number);
}

void enable_launch_calls(bool on) {
  if (library.enable_driver_call != nullptr) {
    for (const auto call : kLaunchCalls) library.enable_driver_call(call, on ? 1 : 0);
  } else if (on) {
    check(library.enable(CUPTI_ACTIVITY_KIND_DRIVER), "cuptiActivityEnable(DRIVER)");
  } else {
    library.disable(CUPTI_ACTIVITY_KIND_DRIVER);
  }
}

void end_session() noexcept {
  library.disable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  library.disable(CUPTI_ACTIVITY_KIND_GRAPH_TRACE);
  if (subscriber != nullptr) library.unsubscribe(subscriber);
  subscriber = nullptr;
}

void begin_session() {
  CUpti_SubscriberHandle handle = nullptr;
  const CUptiResult held = library.subscribe(&handle, ignore, nullptr);
  if (held == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED) {
    throw Error("launches on the device cannot be observed: another profiler holds CUPTI in this program; stop it (" +
                text_of(held) + ")");
  }
  if (held == CUPTI_SUCCESS) subscriber = handle;
  try {
    check(library.register_callbacks(give_buffer, take_buffer), "cuptiActivityRegisterCallbacks");
    check(library.enable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "cuptiActivityEnable(CONCURRENT_KERNEL)");
    check(library.enable(CUPTI_ACTIVITY_KIND_GRAPH_TRACE), "cuptiActivityEnable(GRAPH_TRACE)");
  } catch (const Error&) {
    end_session();
    throw;
  }
}

std::atomic<bool>& flag_of(Use use) noexcept { return use == Use::kCount ? counts : times; }

}  // namespace

void start(Use use, const std::string& path, Deliver deliver) {
  const std::scoped_lock lock(session_mutex);
  if (flag_of(use).load()) return;
  open(path);
  const bool first = !counts.load() && !times.load();
  if (first) begin_session();
  if (use == Use::kTimes) {
    try {
      check(library.enable(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION), "cuptiActivityEnable(EXTERNAL_CORRELATION)");
      enable_launch_calls(true);
    } catch (const Error&) {
      if (first) end_session();
      throw;
    }
    deliver_to.store(deliver, std::memory_order_release);
  }
  flag_of(use).store(true);
}

void stop(Use use) noexcept {
  const std::scoped_lock lock(session_mutex);
  if (!flag_of(use).exchange(false)) return;
  if (use == Use::kTimes) {
    deliver_to.store(nullptr, std::memory_order_release);
    enable_launch_calls(false);
    library.disable(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION);
  }
  if (!counts.load() && !times.load()) end_session();
}

bool started(Use use) noexcept { return flag_of(use).load(std::memory_order_relaxed); }

void flush(Use use, bool all) {
  if (!started(use)) return;
  check(library.flush_all(all ? CUPTI_ACTIVITY_FLAG_FLUSH_FORCED : 0), "cuptiActivityFlushAll");
}

std::uint64_t device_launches() noexcept { return ran.load(std::memory_order_relaxed); }
std::uint64_t dropped_records() noexcept { return lost.load(std::memory_order_relaxed); }

std::uint64_t timestamp() noexcept {
  std::uint64_t now = 0;
  return library_version.load() != 0 && library.get_timestamp(&now) == CUPTI_SUCCESS ? now : 0;
}

std::uint32_t version() noexcept { return library_version.load(std::memory_order_relaxed); }

void push(std::uint64_t launch) noexcept { library.push(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, launch); }

void pop() noexcept {
  std::uint64_t launch = 0;
  library.pop(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, &launch);
}

std::uint64_t hash_of(const char* name) noexcept {
  std::uint64_t hash = 1;
  for (; *name != '\0'; ++name) hash = mix(hash, static_cast<unsigned char>(*name));
  return hash == 0 ? 1 : hash;
}

}  // namespace cudasched::telemetry::cupti
