#include "telemetry/event_timer.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "base/clock.hpp"
#include "driver/driver.hpp"

namespace cudasched::telemetry {
namespace {

constexpr int kCalibrations = 64;
constexpr const char* kEmptyKernel =
    ".version 6.3\n.target sm_75\n.address_size 64\n.visible .entry cudasched_empty() { ret; }\n";

template <typename Function>
Function* look_up(const char* name, int since) noexcept {
  void* found = nullptr;
  if (driver::table().cuGetProcAddress_v1(name, &found, since, 0) != CUDA_SUCCESS) return nullptr;
  return reinterpret_cast<Function*>(found);
}

std::int64_t elapsed_ns(CUevent start, CUevent end, bool& ok) noexcept {
  float ms = 0;
  ok = driver::table().cuEventElapsedTime_v1(&ms, start, end) == CUDA_SUCCESS && std::isfinite(ms);
  return ok ? std::llround(static_cast<double>(ms) * 1e6) : 0;
}

}  // namespace

struct EventTimer::Place {
  CUcontext context = nullptr;  // null: it has gone
  CUstream stream = nullptr;    // ours, for calibration and reference
  CUevent reference = nullptr;
  std::int64_t reference_ns = 0;
  Overhead overhead;
  std::vector<Pair*> free;
  std::vector<std::unique_ptr<Pair>> pairs;

  Pair* make() {
    auto pair = std::make_unique<Pair>();
    pair->place = this;
    auto& driver = driver::table();
    if (driver.cuEventCreate(&pair->start, CU_EVENT_DEFAULT) != CUDA_SUCCESS) return nullptr;
    if (driver.cuEventCreate(&pair->end, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
      driver.cuEventDestroy(pair->start);
      return nullptr;
    }
    pairs.push_back(std::move(pair));
    return pairs.back().get();
  }

  void tie_clock() noexcept {
    auto& driver = driver::table();
    if (reference == nullptr || driver.cuEventRecord(reference, stream) != CUDA_SUCCESS) return;
    if (driver.cuEventSynchronize(reference) == CUDA_SUCCESS) reference_ns = now_ns();
  }

  // The times between a pair's events, with the kernel between them or nothing, rising; false: it failed.
  bool measure(Pair& pair, CUfunction kernel, std::array<std::int64_t, kCalibrations>& times) const noexcept {
    auto& driver = driver::table();
    for (std::int64_t& time : times) {
      bool ok = driver.cuEventRecord(pair.start, stream) == CUDA_SUCCESS;
      if (ok && kernel != nullptr) {
        ok = driver.cuLaunchKernel.legacy(kernel, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr) == CUDA_SUCCESS;
      }
      ok = ok && driver.cuEventRecord(pair.end, stream) == CUDA_SUCCESS &&
           driver.cuEventSynchronize(pair.end) == CUDA_SUCCESS;
      if (ok) time = elapsed_ns(pair.start, pair.end, ok);
      if (!ok) return false;
    }
    std::sort(times.begin(), times.end());
    return true;
  }

  void calibrate() {
    auto* const create = look_up<CUresult(CUstream*, unsigned)>("cuStreamCreate", 2000);
    if (create == nullptr || create(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return;
    if (driver::table().cuEventCreate(&reference, CU_EVENT_DEFAULT) != CUDA_SUCCESS) reference = nullptr;
    tie_clock();
    Pair* const pair = make();
    if (pair == nullptr) return;
    auto* const load = look_up<CUresult(CUmodule*, const void*)>("cuModuleLoadData", 2000);
    auto* const get = look_up<CUresult(CUfunction*, CUmodule, const char*)>("cuModuleGetFunction", 2000);
    std::array<std::int64_t, kCalibrations> times{};
    CUmodule module = nullptr;
    CUfunction kernel = nullptr;
    if (load != nullptr && get != nullptr && load(&module, kEmptyKernel) == CUDA_SUCCESS &&
        get(&kernel, module, "cudasched_empty") == CUDA_SUCCESS) {
      overhead.of_empty_kernel = measure(*pair, kernel, times);
      if (overhead.of_empty_kernel) {
        overhead.subtracted_ns = std::max<std::int64_t>(0, times[kCalibrations / 2] - kEmptyKernelNs);
      }
    }
    if (measure(*pair, nullptr, times)) {
      // Events come in ticks: only their mean is finer. The slowest are those that something else came between.
      constexpr int kCounted = kCalibrations * 3 / 4;
      overhead.empty_pair_ns = std::accumulate(times.begin(), times.begin() + kCounted, std::int64_t{0}) / kCounted;
      if (!overhead.of_empty_kernel) overhead.subtracted_ns = std::max<std::int64_t>(0, times[kCalibrations / 2]);
    }
    free.push_back(pair);
  }
};

EventTimer::EventTimer() = default;

EventTimer::Place* EventTimer::place_of_current() noexcept {
  CUcontext const context = driver::shareable_context();
  if (context == nullptr) return nullptr;
  for (const auto& place : places_) {
    if (place->context == context) return place.get();
  }
  const driver::RelaxedCapture relaxed;
  auto place = std::make_unique<Place>();
  place->context = context;
  place->calibrate();
  places_.push_back(std::move(place));
  return places_.back().get();
}

EventTimer::Pair* EventTimer::begin(CUstream stream) noexcept {
  try {
    Pair* pair = nullptr;
    {
      const std::scoped_lock lock(mutex_);
      Place* const place = place_of_current();
      if (place == nullptr) return nullptr;
      if (place->free.empty()) {
        if (place->pairs.size() >= kMostPairs) return nullptr;
        pair = place->make();
      } else {
        pair = place->free.back();
        place->free.pop_back();
      }
    }
    if (pair == nullptr) return nullptr;
    pair->ended = false;
    if (driver::table().cuEventRecord(pair->start, stream) == CUDA_SUCCESS) return pair;
    give_back(pair);
  } catch (const std::exception&) {  // out of memory: the launch stays untimed
  }
  return nullptr;
}

void EventTimer::end(Pair* pair, CUstream stream) noexcept {
  if (pair != nullptr) pair->ended = driver::table().cuEventRecord(pair->end, stream) == CUDA_SUCCESS;
}

// read(place): whether the times could be had.
template <typename Read>
EventTimer::Answer EventTimer::when_complete(Pair* pair, Read read) noexcept {
  const std::scoped_lock lock(mutex_);
  Place& place = *pair->place;
  bool ok = false;
  if (place.context != nullptr && pair->ended) {
    const driver::RelaxedCapture relaxed;
    const CUresult status = driver::table().cuEventQuery(pair->end);
    if (status == CUDA_ERROR_NOT_READY) return Answer::kNotYet;
    ok = status == CUDA_SUCCESS && read(place);
  }
  place.free.push_back(pair);
  return ok ? Answer::kTimed : Answer::kFailed;
}

EventTimer::Answer EventTimer::read(Pair* pair, std::int64_t& start_ns, std::int64_t& duration_ns) noexcept {
  return when_complete(pair, [&](const Place& place) {
    bool ok = place.reference != nullptr;
    if (ok) duration_ns = std::max(kLeastNs, elapsed_ns(pair->start, pair->end, ok) - place.overhead.subtracted_ns);
    if (ok) start_ns = place.reference_ns + elapsed_ns(place.reference, pair->start, ok);
    return ok;
  });
}

EventTimer::Answer EventTimer::read_elapsed(Pair* pair, std::int64_t& between_ns) noexcept {
  return when_complete(pair, [&](const Place&) {
    bool ok = false;
    between_ns = elapsed_ns(pair->start, pair->end, ok);
    return ok;
  });
}

void EventTimer::give_back(Pair* pair) noexcept {
  const std::scoped_lock lock(mutex_);
  pair->place->free.push_back(pair);
}

void EventTimer::refresh() noexcept {
  const std::scoped_lock lock(mutex_);
  for (const auto& place : places_) {
    if (place->context == nullptr) continue;
    const driver::RelaxedCapture relaxed;
    const driver::CurrentContext current(place->context);
    if (current.ok()) place->tie_clock();
  }
}

void EventTimer::forget(CUcontext context) noexcept {
  const std::scoped_lock lock(mutex_);
  for (const auto& place : places_) {
    if (context == nullptr || place->context == context) place->context = nullptr;
  }
}

EventTimer::Overhead EventTimer::overhead() noexcept {
  const std::scoped_lock lock(mutex_);
  for (const auto& place : places_) {
    if (place->context != nullptr) return place->overhead;
  }
  return places_.empty() ? Overhead{} : places_.back()->overhead;
}

}  // namespace cudasched::telemetry
