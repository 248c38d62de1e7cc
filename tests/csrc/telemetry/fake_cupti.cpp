// A stand-in for libcupti: every driver call with a pushed correlation ran a kernel, one after the other, right away.
// Named by CUDASCHED_CUPTI, it covers what is done with CUPTI where there is no GPU. Environment:
//   FAKE_CUPTI_VERSION   what cuptiGetVersion gives (130001)
//   FAKE_CUPTI_HELD      1: another profiler holds CUPTI
//   FAKE_CUPTI_GRID      grid x of all kernels (1); block x: FAKE_CUPTI_BLOCK (32); name: FAKE_CUPTI_NAME (work)
//   FAKE_CUPTI_NS        how long a kernel runs (20000)
//   FAKE_CUPTI_OVERLAP   1: a kernel starts when the one before is half done
//   FAKE_CUPTI_SILENT    1: no correlation is ever given
//   FAKE_CUPTI_DROP      n: each nth kernel's record is lost
#include <cupti.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace {

std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

const char* name_setting() {
  const char* const value = std::getenv("FAKE_CUPTI_NAME");
  return value == nullptr ? "work" : value;
}

constexpr std::uint64_t kAhead = 1'000'000'000'000;  // of CLOCK_MONOTONIC

std::uint64_t now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count()) + kAhead;
}

struct Run {
  std::uint64_t id;
  std::uint32_t correlation;
  std::uint64_t start;
};

std::mutex lock;
CUpti_BuffersCallbackRequestFunc give = nullptr;
CUpti_BuffersCallbackCompleteFunc take = nullptr;
std::vector<Run>& runs = *new std::vector<Run>;  // outlives the program's exit handlers
std::uint64_t next_start = 0;
std::uint32_t next_correlation = 1;
bool kernels_on = false;
bool correlations_on = false;
thread_local std::uint64_t pushed = 0;

template <typename Record>
void put(std::uint8_t* buffer, std::size_t& at, const Record& record) {
  std::memcpy(buffer + at, &record, sizeof record);
  at += sizeof record;
}

void hand_over(const std::vector<Run>& some) {
  for (std::size_t first = 0; first < some.size(); first += 64) {
    std::uint8_t* buffer = nullptr;
    std::size_t bytes = 0;
    std::size_t most = 0;
    give(&buffer, &bytes, &most);
    std::size_t at = 0;
    for (std::size_t i = first; i < some.size() && i < first + 64; ++i) {
      const std::uint64_t drop = setting("FAKE_CUPTI_DROP", 0);
      if (drop == 0 || i % drop != 0) {
        CUpti_ActivityKernel10 kernel{};
        kernel.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
        kernel.start = some[i].start;
        kernel.end = kernel.start + setting("FAKE_CUPTI_NS", 20'000);
        kernel.correlationId = some[i].correlation;
        kernel.streamId = 7;
        kernel.gridX = static_cast<int>(setting("FAKE_CUPTI_GRID", 1));
        kernel.blockX = static_cast<int>(setting("FAKE_CUPTI_BLOCK", 32));
        kernel.gridY = kernel.gridZ = kernel.blockY = kernel.blockZ = 1;
        kernel.name = name_setting();
        put(buffer, at, kernel);
      }
      // After the kernel, and so later than what it explains.
      if (setting("FAKE_CUPTI_SILENT", 0) == 0) {
        CUpti_ActivityExternalCorrelation external{};
        external.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
        external.externalKind = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;
        external.externalId = some[i].id;
        external.correlationId = some[i].correlation;
        put(buffer, at, external);
      }
    }
    take(nullptr, 0, buffer, bytes, at);
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUptiResult cuptiGetVersion(std::uint32_t* version) {
  *version = static_cast<std::uint32_t>(setting("FAKE_CUPTI_VERSION", 130'001));
  return CUPTI_SUCCESS;
}

CUptiResult cuptiGetResultString(CUptiResult, const char** text) {
  *text = "CUPTI_FAKE";
  return CUPTI_SUCCESS;
}

CUptiResult cuptiGetTimestamp(std::uint64_t* timestamp) {
  *timestamp = now();
  return CUPTI_SUCCESS;
}

CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* subscriber, CUpti_CallbackFunc, void*) {
  if (setting("FAKE_CUPTI_HELD", 0) != 0) return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
  *subscriber = reinterpret_cast<CUpti_SubscriberHandle>(&lock);
  return CUPTI_SUCCESS;
}

CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle) { return CUPTI_SUCCESS; }

CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                           CUpti_BuffersCallbackCompleteFunc complete) {
  give = request;
  take = complete;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
  if (kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) kernels_on = true;
  if (kind == CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION) correlations_on = true;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
  if (kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) kernels_on = false;
  if (kind == CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION) correlations_on = false;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId, std::uint8_t) { return CUPTI_SUCCESS; }

CUptiResult cuptiActivityFlushAll(std::uint32_t) {
  std::vector<Run> done;
  {
    const std::scoped_lock held(lock);
    done.swap(runs);
  }
  hand_over(done);
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityGetNextRecord(std::uint8_t* buffer, std::size_t bytes, CUpti_Activity** record) {
  std::uint8_t* next = buffer;
  if (*record != nullptr) {
    next = reinterpret_cast<std::uint8_t*>(*record);
    next += (*record)->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL ? sizeof(CUpti_ActivityKernel10)
                                                                     : sizeof(CUpti_ActivityExternalCorrelation);
  }
  if (next >= buffer + bytes) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = reinterpret_cast<CUpti_Activity*>(next);
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, std::uint32_t, std::size_t* dropped) {
  *dropped = 0;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind, std::uint64_t id) {
  pushed = id;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind, std::uint64_t* id) {
  if (id != nullptr) *id = pushed;
  const std::scoped_lock held(lock);
  if (!kernels_on || !correlations_on) return CUPTI_SUCCESS;
  const std::uint64_t length = setting("FAKE_CUPTI_NS", 20'000);
  const std::uint64_t start = next_start > now() ? next_start : now();
  next_start = start + (setting("FAKE_CUPTI_OVERLAP", 0) != 0 ? length / 2 : length);
  runs.push_back({pushed, next_correlation++, start});
  return CUPTI_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
