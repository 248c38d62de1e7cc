// cudasched from C++: a face of engine.h, so that the ABI is C. Header-only, C++20; link cudasched::cudasched.
//
//   auto scheduler = cudasched::Scheduler::create({.preference = cudasched::Preference::kLatency});
//   ...
//   scheduler.expect(500us);                                       // a request is on its way
//   {
//     const cudasched::Region region(cudasched::Class::kLatency, 5ms);  // launches of this thread: class and SLO
//     launch_and_synchronise();
//   }
//
// A process has one engine, and every Scheduler is a handle to that engine: a setting made through one holds for all.
// create() comes before the program's first CUDA call. Times are std::chrono durations. Everything may be called from
// any thread. Faults are thrown as an Error whose text names the remedy; nothing here ends the process.
#ifndef CUDASCHED_SCHEDULER_HPP_
#define CUDASCHED_SCHEDULER_HPP_

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cudasched/engine.h"

namespace cudasched {
// Apart from the engine's own names, which live in the same namespace.
inline namespace v1 {

// ---- errors: the tree of csrc/base/error.hpp, as far as it leaves the library ---------------------------------------

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The program's CUDA calls cannot be seen: CUDA was loaded first, there is no driver, or the installation is broken.
class HookError : public Error {
 public:
  using Error::Error;
};

// A setting has no meaning, or comes too late.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// The shared table of a GPU's clients cannot be opened, or is full.
class ArbiterError : public Error {
 public:
  using Error::Error;
};

// A driver call failed.
class DriverError : public Error {
 public:
  using Error::Error;
};

// ---- settings -------------------------------------------------------------------------------------------------------

// kLatency launches pass at once. So do kNormal ones, the default, which hold no other launch back. kBestEffort
// launches wait at the gate.
enum class Class : std::int32_t {
  kNormal = CUDASCHED_NORMAL,
  kLatency = CUDASCHED_LATENCY,
  kBestEffort = CUDASCHED_BEST_EFFORT
};

// The rule that admits this process's best-effort launches while latency work is active or announced.
enum class Policy {
  kStrict,   // nothing goes
  kSlack,    // launches that fit the slack that the SLOs of the active requests leave
  kHarvest,  // launches that fit into the gaps of requests that keep the host busy and the GPU idle
  kOpen      // everything goes at once: no gate
};

// The aim that wins where both cannot be had. An option that is set replaces the preference's value for that option.
enum class Preference {
  kLatency,    // Policy::kStrict and a fixed lead of 10 us
  kThroughput  // Policy::kSlack and an adaptive lead
};

enum class LogLevel { kError, kWarning, kInfo, kDebug };

using Milliseconds = std::chrono::duration<double, std::milli>;
using Microseconds = std::chrono::duration<double, std::micro>;

// Lead: as small as keeps the GPU from running dry, found while the program runs.
inline constexpr Microseconds kAdaptiveLead{-1};

// An option that is not set keeps the value of the environment (CUDASCHED_LEAD_US, ...) or the default
// (docs/configuration.md).
struct Options {
  std::optional<Preference> preference{};
  std::optional<Policy> policy{};
  bool preemption = true;  // false: best effort is not held back, which is Policy::kOpen

  // How much best-effort time may be in flight when the next best-effort launch is submitted.
  std::optional<Microseconds> lead{};
  // The part of a request's slack that Policy::kSlack leaves unused.
  std::optional<Microseconds> margin{};
  // Best-effort kernels over this start only when no latency work is expected meanwhile.
  std::optional<Microseconds> long_kernel{};
  // The adaptive lead's bound on latency, as a multiple of the latency on an idle GPU; 1.2: 20% longer.
  std::optional<double> max_inflation{};
  // How much longer Policy::kHarvest may make each part of a latency request between two waits for the GPU; 1.03: 3%.
  std::optional<double> host_bound_inflation{};
  // Best-effort launches are made by a thread of cudasched's, while the program's go on.
  std::optional<bool> offload{};
  // Of the engine's lines on standard error.
  std::optional<LogLevel> log_level{};

  // Of launches that no region and no stream decides. slo (0: none) and priority (higher first) go with the class.
  std::optional<Class> process_class{};
  Milliseconds slo{0};
  std::int32_t priority = 0;
};

// ---- reports --------------------------------------------------------------------------------------------------------

// A histogram of times: counts.h has its buckets. A quantile is within 12% of the truth.
struct Times {
  std::array<std::uint64_t, CUDASCHED_TIME_BUCKETS> buckets{};
  std::chrono::nanoseconds sum{0};

  std::uint64_t count() const {
    std::uint64_t all = 0;
    for (const std::uint64_t bucket : buckets) all += bucket;
    return all;
  }

  // The time that this share (0 to 1) of all stay below; 0 where there is none.
  std::chrono::nanoseconds quantile(double share) const {
    const double rank = std::clamp(share, 0.0, 1.0) * static_cast<double>(count());
    double before = 0;
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      const auto here = static_cast<double>(buckets[i]);
      if (here > 0 && before + here >= rank) {
        const auto begin = static_cast<double>(begin_ns(i));
        const double end = i + 1 < buckets.size() ? static_cast<double>(begin_ns(i + 1)) : begin;
        return std::chrono::nanoseconds(static_cast<std::int64_t>(begin + (end - begin) * (rank - before) / here));
      }
      before += here;
    }
    return std::chrono::nanoseconds(0);
  }

  // Where a bucket begins.
  static constexpr std::int64_t begin_ns(std::size_t bucket) {
    if (bucket == 0) return 0;
    return static_cast<std::int64_t>(4 + (bucket - 1) % 4) << (8 + (bucket - 1) / 4);
  }
};

// Requests of the latency regions of one name; without a name, of a latency program. A request lasts from the region's
// entry until the region is left and its work complete.
struct RegionMetrics {
  std::string name;
  std::chrono::nanoseconds slo{0};  // of the last one that had a target
  std::uint64_t met = 0;            // requests that kept their target,
  std::uint64_t missed = 0;         // and that did not
  Times times;                      // of all
};

// Counters since the process's first CUDA call.
struct Metrics {
  bool attached = false;               // the program's CUDA calls are seen; false before the first of them
  bool scheduling = false;             // classes have an effect; false before the first CUDA call, and when off
  std::string off_reason;              // why scheduling is off, empty if it is not
  std::string driver_path;             // of the real driver
  int driver_version = 0;              // 13000 for 13.0
  std::uint64_t launches = 0;          // kernel and graph launches seen, failed ones left out
  std::uint64_t latency_launches = 0;  // of these
  std::uint64_t best_effort_launches = 0;
  std::uint64_t gate_waits = 0;  // of the gated ones, those that waited
  std::chrono::nanoseconds gate_wait{0};
  std::chrono::nanoseconds launcher_cpu{0};     // CPU time of the launcher threads,
  std::chrono::nanoseconds launcher_driver{0};  // and about how much of it inside the driver's calls
  std::uint64_t device_launches = 0;      // run by the device, as CUPTI counts; 0 without Scheduler::start_coverage
  std::uint64_t without_room = 0;         // kernels whose parameters the predictor had no room to learn
  std::chrono::nanoseconds in_flight{0};  // predicted, of the best-effort work that is submitted; of now
  std::chrono::nanoseconds best_effort_gpu{0};  // predicted, of best-effort launches that are complete
  std::chrono::nanoseconds latency_active{0};   // how long latency work held the gate closed
  Times gate_wait_times;                        // of launches that waited at the gate
  Times queue_wait_times;  // of one offloaded launch in 16: from the program's call to the driver's
  Times preemption_times;  // best-effort work in flight when a request began
  // Of launches that were timed with no other launch of this process beside them: the number, the number within the
  // upper bound, the sums of predicted and measured times, and the sum of the absolute differences.
  std::uint64_t predictions = 0;
  std::uint64_t within_bound = 0;
  std::chrono::nanoseconds predicted{0};
  std::chrono::nanoseconds measured{0};
  std::chrono::nanoseconds prediction_off{0};
  std::vector<RegionMetrics> regions;  // that had a request
  // And the numbers of counts.inc, where each is explained.
#define CUDASCHED_SHARDED(name, metric, text) std::uint64_t name = 0;
#define CUDASCHED_ONCE CUDASCHED_SHARDED
#include "cudasched/counts.inc"
};

// The result of Scheduler::stop_collecting.
struct Collected {
  std::string journal;     // the file that the launches are in; empty: nothing was being collected
  std::uint64_t rows = 0;  // launches in it
  std::uint64_t lost = 0;  // launches that are not, for want of memory or disk
};

namespace detail {

inline void check(int status) {
  if (status == CUDASCHED_OK) return;
  const std::string message = cudasched_last_error();
  switch (status) {
    case CUDASCHED_HOOK_ERROR:
      throw HookError(message);
    case CUDASCHED_CONFIG_ERROR:
      throw ConfigError(message);
    case CUDASCHED_ARBITER_ERROR:
      throw ArbiterError(message);
    case CUDASCHED_DRIVER_ERROR:
      throw DriverError(message);
    default:
      throw Error(message);
  }
}

inline Times times(const cudasched_times& from) {
  Times to;
  std::copy(std::begin(from.buckets), std::end(from.buckets), to.buckets.begin());
  to.sum = std::chrono::nanoseconds(from.sum_ns);
  return to;
}

// In every locale with a point.
inline std::string text(double number) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number);
  return {digits.data(), end.ptr};
}

// The names are in the order of the enumerators. Another value stays a number, which the engine refuses.
template <typename Enum>
std::string name(Enum value, std::initializer_list<const char*> names) {
  const auto place = static_cast<std::size_t>(value);
  return place < names.size() ? names.begin()[place] : std::to_string(place);
}

// For a C function, which would read as far as the first zero byte.
inline const char* whole(const std::string& text) {
  if (text.find('\0') == std::string::npos) return text.c_str();
  throw ConfigError("there is a zero byte in the name or value \"" + std::string(text.c_str()) + "...\"");
}

inline void check_version(std::string_view library) {
  if (library.starts_with(CUDASCHED_API ".")) return;
  throw HookError("the program was built for cudasched " CUDASCHED_API ", and libcudasched.so is " +
                  std::string(library) + ", whose structs may be others: build the program anew with that version");
}

}  // namespace detail

// ---- regions --------------------------------------------------------------------------------------------------------

// While a Region lives, launches of its thread have the region's class and latency target (from now on; 0: none). The
// same thread ends the region. Regions nest and the innermost holds; a stream's own class takes precedence. The best
// hint is to enter a latency region before the request's input is prepared. Where cudasched is not in front of the
// driver, a region does nothing.
class Region {
 public:
  // Throws ConfigError (an SLO that is negative or over an hour), Error (nested too deep).
  [[nodiscard]] explicit Region(Class region_class, Milliseconds slo = Milliseconds::zero(),
                                std::int32_t priority = 0) {
    detail::check(cudasched_region_enter(static_cast<std::int32_t>(region_class), priority, slo.count(), &token_));
  }
  // With a name, under which metrics().regions counts its requests: 1 to 63 bytes of UTF-8 without control characters.
  // A process has 10 names; regions of further names are counted as "(others)". Throws ConfigError, Error.
  [[nodiscard]] Region(Class region_class, Milliseconds slo, std::int32_t priority, const std::string& name) {
    detail::check(cudasched_region_enter_named(static_cast<std::int32_t>(region_class), priority, slo.count(),
                                               detail::whole(name), &token_));
  }
  ~Region() { cudasched_region_exit(token_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

 private:
  std::uint64_t token_ = 0;
};

// ---- the scheduler --------------------------------------------------------------------------------------------------

class Scheduler {
 public:
  // Puts the driver shim that lies beside libcudasched.so in front of the driver, for all CUDA calls from here on, and
  // sets the options. Makes no CUDA call. A second call hooks nothing, nor does one under `cudasched run`, in a program
  // that links cudasched::driver, or under CUDASCHED_OFF=1. The options are set all the same. Throws HookError (CUDA is
  // loaded already, there is no driver, the library is of another minor version: a program that can do without goes
  // on), and the errors of configure.
  static Scheduler create(const Options& options = {}) {
    detail::check_version(cudasched_version());
    detail::check(cudasched_install());
    Scheduler scheduler;
    scheduler.configure(options);
    return scheduler;
  }

  // Applies the options that have a value, in this order and up to the first invalid one. After the first CUDA call,
  // options that cannot change any more are refused. Throws ConfigError.
  void configure(const Options& options) {
    if (!options.preemption && options.policy && *options.policy != Policy::kOpen) {
      throw ConfigError(
          "preemption = false lets every best-effort launch go, and the policy says another thing: set one");
    }
    std::optional<Policy> policy = options.policy;
    std::optional<Microseconds> lead = options.lead;
    if (options.preference) {
      const bool latency = *options.preference == Preference::kLatency;
      policy = policy.value_or(latency ? Policy::kStrict : Policy::kSlack);
      lead = lead.value_or(latency ? Microseconds(10) : kAdaptiveLead);
    }
    if (!options.preemption) policy = Policy::kOpen;

    if (options.log_level) configure("log", detail::name(*options.log_level, {"error", "warning", "info", "debug"}));
    if (policy) configure("policy", detail::name(*policy, {"strict", "slack", "harvest", "open"}));
    if (lead) configure("lead_us", *lead == kAdaptiveLead ? "auto" : detail::text(lead->count()));
    if (options.margin) configure("margin_us", detail::text(options.margin->count()));
    if (options.long_kernel) configure("long_us", detail::text(options.long_kernel->count()));
    if (options.max_inflation) configure("max_inflation", detail::text(*options.max_inflation));
    if (options.host_bound_inflation) configure("host_bound_inflation", detail::text(*options.host_bound_inflation));
    if (options.offload) configure("offload", *options.offload ? "1" : "0");
    if (options.process_class) {
      detail::check(cudasched_set_process_class(static_cast<std::int32_t>(*options.process_class), options.priority,
                                                options.slo.count()));
    } else if (options.slo != Milliseconds::zero() || options.priority != 0) {
      throw ConfigError(
          "slo and priority are of the process's class: set process_class, too, or give them to a Region");
    }
  }

  // Any setting by its name in docs/configuration.md, and its value as text. Throws ConfigError.
  void configure(const std::string& name, const std::string& value) {
    detail::check(cudasched_configure(detail::whole(name), detail::whole(value)));
  }

  // Announces latency work of this process within this time, over 0 and at most a second. Best-effort work holds back
  // until that work arrives or the time is over. Throws ConfigError.
  void expect(Milliseconds within) { detail::check(cudasched_expect(within.count())); }

  // Gives a CUstream or cudaStream_t a class, for launches of every thread. Unbind a stream before its destruction.
  // Throws Error: a default stream, or more than 256 of them.
  void bind_stream(const void* stream, Class stream_class) {
    detail::check(
        cudasched_bind_stream(reinterpret_cast<std::uintptr_t>(stream), static_cast<std::int32_t>(stream_class)));
  }
  void unbind_stream(const void* stream) {
    detail::check(cudasched_unbind_stream(reinterpret_cast<std::uintptr_t>(stream)));
  }

  // A best-effort CUstream whose kernels run on that fraction of the SMs alone (over 0, below 1). The stream is
  // non-blocking and of the primary context, which must be current. The same fraction returns the same stream. Never
  // destroy it (docs/partitions.md). Throws ConfigError, HookError, DriverError, Error.
  void* partition_stream(double fraction) {
    std::uint64_t stream = 0;
    detail::check(cudasched_partition_stream(fraction, &stream));
    return reinterpret_cast<void*>(stream);
  }

  // Throws Error.
  Metrics metrics() const {
    cudasched_state state{};
    cudasched_get_state(&state);
    Metrics metrics;
    metrics.attached = state.attached != 0;
    metrics.scheduling = state.scheduling != 0;
    metrics.off_reason = state.off_reason;
    metrics.driver_path = state.driver_path;
    metrics.driver_version = state.driver_version;
    const auto counts = std::make_unique<cudasched_counts>();
    detail::check(cudasched_get_counts(counts.get()));
    using std::chrono::nanoseconds;
    metrics.launches = counts->normal_launches + counts->latency_launches + counts->best_effort_launches;
    metrics.latency_launches = counts->latency_launches;
    metrics.best_effort_launches = counts->best_effort_launches;
    metrics.gate_wait_times = detail::times(counts->gate_waits);
    metrics.gate_waits = metrics.gate_wait_times.count();
    metrics.gate_wait = metrics.gate_wait_times.sum;
    metrics.launcher_cpu = nanoseconds(counts->launcher_cpu_ns);
    metrics.launcher_driver = nanoseconds(counts->launcher_driver_ns);
    metrics.device_launches = counts->device_launches;
    metrics.without_room = counts->without_room;
    metrics.in_flight = nanoseconds(cudasched_in_flight_ns());
    metrics.best_effort_gpu = nanoseconds(counts->best_effort_gpu_ns);
    metrics.latency_active = nanoseconds(counts->latency_active_ns);
    metrics.queue_wait_times = detail::times(counts->queue_waits);
    metrics.preemption_times = detail::times(counts->preemptions);
    metrics.predictions = counts->predictions;
    metrics.within_bound = counts->within_bound;
    metrics.predicted = nanoseconds(counts->predicted_ns);
    metrics.measured = nanoseconds(counts->measured_ns);
    metrics.prediction_off = nanoseconds(counts->prediction_off_ns);
#define CUDASCHED_SHARDED(name, metric, text) metrics.name = counts->name;
#define CUDASCHED_ONCE CUDASCHED_SHARDED
#include "cudasched/counts.inc"
    for (const cudasched_region_counts& region : counts->regions) {
      const Times times = detail::times(region.times);
      if (times.count() == 0) continue;
      metrics.regions.push_back({region.name, nanoseconds(region.slo_ns), region.met, region.missed, times});
    }
    return metrics;
  }

  // Profiling. Both use CUPTI, which has one user at a time. libcupti is the one already loaded, or the loader's search
  // finds one. Both throw Error, HookError.

  // Counts the kernels that the device runs from here on in metrics().device_launches, to compare with `launches`. Call
  // it after the first CUDA call. count_finished waits until finished work is in the count.
  void start_coverage() { detail::check(cudasched_coverage_start(nullptr)); }
  void count_finished() { detail::check(cudasched_coverage_flush()); }

  // Records each launch with its shape, parameters and device time into a journal in the existing directory. Timed by
  // "cupti" or, coarser and without CUPTI, by "events". docs/cpp.md says how to read it.
  void start_collecting(const std::string& directory, const std::string& timing = "cupti") {
    detail::check(cudasched_collect_start(directory.c_str(), timing.c_str(), nullptr, 0));
  }
  Collected stop_collecting() {
    cudasched_collected collected{};
    detail::check(cudasched_collect_stop(&collected));
    return {collected.journal, collected.rows, collected.lost};
  }

 private:
  Scheduler() = default;
};

}  // namespace v1
}  // namespace cudasched

#endif
