// Collecting launches: runtime/collecting.hpp, and the collect section of include/cudasched/engine.h.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "cudasched/engine.h"
#include "driver/driver.hpp"
#include "driver/functions.hpp"
#include "runtime/collecting.hpp"
#include "runtime/engine.hpp"
#include "runtime/guarded.hpp"
#include "runtime/memory/memory.hpp"

namespace cudasched::runtime {
namespace {

int current_ordinal() noexcept {
  CUdevice device = 0;
  return driver::table().cuCtxGetDevice(&device) == CUDA_SUCCESS ? device : 0;
}

telemetry::Timing timing_of(const std::string& name) {
  if (name.empty() || name == "cupti") return telemetry::Timing::kCupti;
  if (name == "events") return telemetry::Timing::kEvents;
  if (name == "both") return telemetry::Timing::kBoth;
  throw ConfigError("launches are timed by \"cupti\", by \"events\" or by \"both\"; got \"" + name + "\"");
}

// A collection that was asked for before the process's first cuInit, and the error of its start.
struct PendingCollection {
  std::mutex mutex;
  std::optional<telemetry::CollectOptions> options;
  std::string error;
};

PendingCollection& asked() noexcept {
  static PendingCollection state;
  return state;
}

// The most memory that was held on a GPU; the graphs that are launched whole: by reason how many, how long the longest
// is predicted to be, and its nodes.
std::string ending() {
  std::uint64_t peak = 0;
  for (int device = 0; device < Holdings::kDevices; ++device) {
    peak = std::max(peak, memory().holdings.peak(device));
  }
  const auto all = engine().slices().whole_ever();
  std::string members;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].graphs == 0) continue;
    members += (members.empty() ? "\"" : ", \"") + std::string(graph::name(static_cast<graph::WholeReason>(i))) +
               "\": [" + std::to_string(all[i].graphs) + ", " + std::to_string(all[i].longest_ns) + ", " +
               std::to_string(all[i].longest_nodes) + "]";
  }
  return ", \"memory_peak\": " + std::to_string(peak) + ", \"whole_graphs\": {" + members + "}";
}

void start(telemetry::CollectOptions options) {
  options.ending = &ending;
  telemetry::start_collecting(options);
  // Behind the handlers of the libcupti that is loaded by now, so that ours runs before them.
  static const bool at_exit = std::atexit([] { finish_collecting(); }) == 0;
  (void)at_exit;
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

telemetry::Record begin_collected(const queue::Call& call) noexcept {
  if (call.site.captured) return {};
  return telemetry::begin_record(call.stream, call.may_time());
}

void end_collected(const telemetry::Record& record, const queue::Call& call, CUresult status) noexcept {
  if (!record.open) return;
  if (status != CUDA_SUCCESS) {
    telemetry::end_record(record, nullptr);
    return;
  }
  telemetry::Launched launched{.launch = call};
  launched.stream = call.stream;
  launched.device = current_ordinal();
  if (call.is_graph) {
    telemetry::end_record(record, &launched);
    return;
  }
  driver::ask_occupancy(call, launched.blocks_per_sm);
  std::array<std::uint32_t, predict::Function::kMaxParameterBytes / 4> words;
  if (const driver::KernelFacts* const kernel = driver::functions().find(call.function)) {
    launched.function = &kernel->facts;
    launched.name = kernel->name;
    launched.words = std::span(words).first(kernel->gather(call, words.data()));
  }
  telemetry::end_record(record, &launched);
}

void collect_if_asked(const std::string& cupti_path) noexcept {
  const std::scoped_lock lock(asked().mutex);
  const bool by_call = asked().options.has_value();
  try {
    telemetry::CollectOptions options = asked().options.value_or(telemetry::CollectOptions{});
    asked().options.reset();
    if (!by_call) {
      options.directory = variable("CUDASCHED_COLLECT_DIR");
      if (options.directory.empty()) return;
      options.timing = timing_of(variable("CUDASCHED_COLLECT_TIMING"));
      if (const std::string label = variable("CUDASCHED_COLLECT_LABEL"); !label.empty()) telemetry::set_label(label);
    }
    if (options.cupti_path.empty()) options.cupti_path = cupti_path;
    options.allocations = engine().allocations();
    start(options);
  } catch (const std::exception& error) {
    if (by_call) asked().error = error.what();
    log::warning(error.what());
  }
}

telemetry::Collected finish_collecting() noexcept {
  // A device cannot be waited for while a stream is captured.
  return telemetry::stop_collecting(/*synchronize=*/!hot().may_capture());
}

}  // namespace cudasched::runtime

extern "C" {

int cudasched_collect_start(const char* directory, const char* timing, const char* cupti_path,
                            std::uint64_t capacity_bytes) {
  using namespace cudasched;
  return runtime::guarded([&] {
    telemetry::CollectOptions options;
    options.directory = directory;
    options.timing = runtime::timing_of(timing);
    options.cupti_path = cupti_path == nullptr ? runtime::variable("CUDASCHED_CUPTI") : cupti_path;
    if (capacity_bytes != 0) options.capacity_bytes = capacity_bytes;
    {
      const std::scoped_lock lock(runtime::asked().mutex);
      if (runtime::asked().options) throw Error("launches are collected already; one collection a process at a time");
      runtime::asked().error.clear();
      if (!runtime::hot().scheduling.load()) {  // cuInit comes later, and starts it
        runtime::asked().options = options;
        return;
      }
    }
    options.allocations = runtime::engine().allocations();
    runtime::start(options);
  });
}

int cudasched_collect_stop(struct cudasched_collected* collected) {
  using namespace cudasched;
  return runtime::guarded([&] {
    *collected = {};
    {
      const std::scoped_lock lock(runtime::asked().mutex);
      runtime::asked().options.reset();
      if (!runtime::asked().error.empty()) throw Error(std::exchange(runtime::asked().error, std::string()));
    }
    const auto done = runtime::finish_collecting();
    const std::size_t length = std::min(done.journal.size(), sizeof collected->journal - 1);
    std::memcpy(collected->journal, done.journal.data(), length);
    collected->rows = done.rows;
    collected->lost = done.lost;
  });
}

int cudasched_collect_label(const char* text) {
  return cudasched::runtime::guarded([&] { cudasched::telemetry::set_label(text); });
}

}  // extern "C"
