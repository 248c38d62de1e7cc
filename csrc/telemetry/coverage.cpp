#include "telemetry/coverage.hpp"

#include <cupti.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <vector>

#include "base/error.hpp"

namespace cudasched::telemetry {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{1} << 20;
constexpr std::size_t kBufferAlignment = 8;

struct Cupti {
  decltype(cuptiActivityRegisterCallbacks)* register_callbacks = nullptr;
  decltype(cuptiActivityEnable)* enable = nullptr;
  decltype(cuptiActivityFlushAll)* flush_all = nullptr;
  decltype(cuptiActivityGetNextRecord)* next_record = nullptr;
  decltype(cuptiGetResultString)* result_string = nullptr;
};

constinit Cupti cupti;
constinit std::atomic<bool> started{false};
constinit std::atomic<std::uint64_t> ran{0};

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* bytes, std::size_t* most_records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(kBufferAlignment, kBufferBytes));
  *bytes = *buffer == nullptr ? 0 : kBufferBytes;
  *most_records = 0;
}

// Only the kind of each record is read, the one field that no CUPTI version moves. With graph-level tracing a graph
// launch is one GRAPH_TRACE record, and the kernels inside it have none.
void CUPTIAPI take_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid_bytes) {
  CUpti_Activity* record = nullptr;
  while (cupti.next_record(buffer, valid_bytes, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || record->kind == CUPTI_ACTIVITY_KIND_GRAPH_TRACE) {
      ran.fetch_add(1, std::memory_order_relaxed);
    }
  }
  std::free(buffer);
}

void check(CUptiResult result, const char* call) {
  if (result == CUPTI_SUCCESS) return;
  const char* text = nullptr;
  if (cupti.result_string(result, &text) != CUPTI_SUCCESS || text == nullptr) text = "an unknown result";
  throw Error(std::string("coverage cannot be counted: ") + call + " gave " + text +
              "; if another profiler runs in this program, stop it");
}

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
       "/usr/local/cuda/lib64/libcupti.so.13", "/usr/local/cuda/targets/x86_64-linux/lib/libcupti.so.13"});
  std::string why;
  for (const std::string& candidate : candidates) {
    if (void* handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    if (why.empty()) why = dlerror();
  }
  throw Error("coverage cannot be counted: no CUPTI library could be opened (" + why +
              "); install it with `pip install nvidia-cuda-cupti` or name it in CUDASCHED_CUPTI");
}

template <typename Function>
void find(void* handle, Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(dlsym(handle, name));
  if (function == nullptr) throw Error(std::string("coverage cannot be counted: libcupti has no ") + name);
}

}  // namespace

void start_coverage(const std::string& cupti_path) {
  if (started.load()) return;
  void* handle = open_library(cupti_path);
  find(handle, cupti.register_callbacks, "cuptiActivityRegisterCallbacks");
  find(handle, cupti.enable, "cuptiActivityEnable");
  find(handle, cupti.flush_all, "cuptiActivityFlushAll");
  find(handle, cupti.next_record, "cuptiActivityGetNextRecord");
  find(handle, cupti.result_string, "cuptiGetResultString");
  check(cupti.register_callbacks(give_buffer, take_buffer), "cuptiActivityRegisterCallbacks");
  check(cupti.enable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "cuptiActivityEnable(CONCURRENT_KERNEL)");
  check(cupti.enable(CUPTI_ACTIVITY_KIND_GRAPH_TRACE), "cuptiActivityEnable(GRAPH_TRACE)");
  started.store(true);
}

void flush_coverage() {
  if (started.load()) check(cupti.flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
}

bool coverage_started() noexcept { return started.load(std::memory_order_relaxed); }
std::uint64_t device_launches() noexcept { return ran.load(std::memory_order_relaxed); }

}  // namespace cudasched::telemetry
