#include "runtime/counts.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "base/clock.hpp"
#include "base/hash.hpp"
#include "runtime/engine.hpp"
#include "runtime/hot.hpp"
#include "telemetry/cupti.hpp"

namespace cudasched::runtime {
namespace {

std::atomic<std::uint64_t> process_number{0};

// Unlike a pid, no other process's, whatever the pid namespaces.
std::uint64_t number_of_process() noexcept {
  std::uint64_t known = process_number.load(std::memory_order_relaxed);
  if (known != 0) return known;
  const auto here = reinterpret_cast<std::uintptr_t>(&known);  // where the stack is, is drawn by the kernel
  const std::uint64_t drawn =
      mix(mix(static_cast<std::uint64_t>(now_ns()), here), static_cast<std::uint64_t>(getpid())) | 1;
  return process_number.compare_exchange_strong(known, drawn) ? drawn : known;
}

void add(const predict::Outlooks::Sums& sums, arbiter::Counts& counts) noexcept {
  static_assert(predict::kLevels == CUDASCHED_LEVELS);
  for (std::size_t i = 0; i < predict::kLevels; ++i) counts.kernels[i] += sums.kernels[i];
  counts.kernel_occupancy += sums.occupancy;
  counts.kernel_sm_utilisation += sums.sm_utilisation;
  counts.kernel_block_efficiency += sums.block_efficiency;
}

}  // namespace

void gather_counts(arbiter::Counts& counts) noexcept {
  counts = {};
  counts.process = number_of_process();
  hot().counters.read(counts);
  counts.device_launches = telemetry::cupti::device_launches();
  const auto whole = engine().slices().whole_lately();
  std::transform(whole.begin(), whole.end(), counts.whole, [](const WholeGraphs& of) {
    return cudasched_whole_graphs{of.graphs, static_cast<std::uint64_t>(of.longest_ns), of.longest_nodes};
  });
  engine().for_each_device([&](Device& device) {
    if (device.gate.registered()) counts.without_room += device.gate.without_room();
    add(device.gate.outlooks().sums(), counts);
    counts.best_effort_gpu_ns += static_cast<std::uint64_t>(device.gate.completed_gpu_ns());
    if (device.queue() == nullptr) return;
    const queue::LauncherTime time = device.queue()->launcher_time();
    counts.launcher_cpu_ns += static_cast<std::uint64_t>(time.cpu_ns);
    counts.launcher_driver_ns += static_cast<std::uint64_t>(time.driver_ns);
    device.queue()->queue_waits().read(counts.queue_waits);
  });
}

void reset_counts_in_child() noexcept { process_number.store(0, std::memory_order_relaxed); }

}  // namespace cudasched::runtime
