// What counting adds to one gated best-effort launch that the launcher thread makes: all that is counted on its way,
// as csrc/queue and csrc/runtime do it, and nothing else. Prints ns a launch, one line a batch.
#include "telemetry/counters.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "base/clock.hpp"
#include "base/histogram.hpp"

namespace {

using cudasched::Histogram;
using cudasched::now_ns;
using cudasched::telemetry::Counters;
using cudasched::telemetry::Shard;

constexpr std::uint64_t kTimed = 16;  // queue::Launcher::kTimed

bool is_timed(std::uint64_t position) { return ((position * 0x9e37'79b9'7f4a'7c15ULL) >> 32) % kTimed == 0; }

struct Process {
  Counters counters;
  Histogram queue_waits;
  std::atomic<std::int64_t> gpu_ns{0};
};

void count(Process& process, std::uint64_t position) {
  std::int64_t pushed_ns = 0;
  if (is_timed(position)) pushed_ns = now_ns();  // Queue::push_locked
  Shard& shard = process.counters.shard(3);
  shard.gated_launches.fetch_add(1, std::memory_order_relaxed);  // Gate::admit_gated
  if (is_timed(position)) {                                      // Launcher::consume; Sampler::completed
    process.queue_waits.add(now_ns() - pushed_ns);
    process.counters.predictions.add(20'000, 25'000, 21'000);
  }
  shard.offloaded_launches.fetch_add(1, std::memory_order_relaxed);  // Gate::submitted
  process.gpu_ns.store(process.gpu_ns.load(std::memory_order_relaxed) + 20'000, std::memory_order_relaxed);  // retire
}

// Of this thread: what others do meanwhile does not count.
std::int64_t cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * cudasched::kNsPerSecond + time.tv_nsec;
}

}  // namespace

int main(int, char** arguments) {
  const auto process = std::make_unique<Process>();
  constexpr std::uint64_t kLaunches = 200'000;
  std::uint64_t position = 0;
  for (int batch = std::atoi(arguments[1]); batch > 0; --batch) {
    const std::int64_t begin = cpu_ns();
    for (std::uint64_t i = 0; i < kLaunches; ++i) count(*process, ++position);
    std::printf("%.4f\n", static_cast<double>(cpu_ns() - begin) / static_cast<double>(kLaunches));
  }
}
