// One program, two kinds of work on one GPU: requests that must be answered soon, and a loop that takes what is left.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <thread>
#include <vector>

#include "cudasched/scheduler.hpp"
#include "gpu.hpp"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using cudasched::Class;

constexpr int kRequests = 50;

void train(const Gpu& gpu, const std::atomic<bool>& enough, std::uint64_t& steps) {
  gpu.use();
  const Gpu::Stream stream = gpu.new_stream();
  const cudasched::Region region(Class::kBestEffort);
  while (!enough) {
    for (int kernel = 0; kernel < 20; ++kernel) gpu.launch(stream, 100us);
    gpu.synchronize(stream);
    ++steps;
  }
}

std::vector<double> serve(const Gpu& gpu, cudasched::Scheduler& scheduler) {
  const Gpu::Stream stream = gpu.new_stream();
  std::vector<double> latencies_ms;
  for (int request = 0; request < kRequests; ++request) {
    std::this_thread::sleep_for(5ms);
    scheduler.expect(1ms);               // the request has been announced,
    std::this_thread::sleep_for(500us);  // and its input is on the way
    const auto begin = Clock::now();
    {
      const cudasched::Region region(Class::kLatency, 5ms);
      gpu.launch(stream, 300us);
      gpu.synchronize(stream);
    }
    latencies_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  }
  std::sort(latencies_ms.begin(), latencies_ms.end());
  return latencies_ms;
}

}  // namespace

int main() {
  try {
    // Before the first CUDA call. A program that can do without cudasched catches the HookError and goes on.
    auto scheduler = cudasched::Scheduler::create({.preference = cudasched::Preference::kLatency});

    const Gpu gpu;
    std::atomic<bool> enough{false};
    std::uint64_t steps = 0;
    std::thread trainer([&] { train(gpu, enough, steps); });
    const auto latencies_ms = serve(gpu, scheduler);
    enough = true;
    trainer.join();

    const auto metrics = scheduler.metrics();
    std::printf("%s: %d requests, P50 %.2f ms, P99 %.2f ms; %llu training steps beside them\n", gpu.name().c_str(),
                kRequests, latencies_ms[kRequests / 2], latencies_ms[kRequests * 99 / 100],
                static_cast<unsigned long long>(steps));
    std::printf("launches: %llu latency, %llu best effort, of which %llu waited %.1f ms in all; scheduling: %s\n",
                static_cast<unsigned long long>(metrics.latency_launches),
                static_cast<unsigned long long>(metrics.best_effort_launches),
                static_cast<unsigned long long>(metrics.gate_waits), cudasched::Milliseconds(metrics.gate_wait).count(),
                metrics.scheduling ? "on" : metrics.off_reason.c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "shared_gpu: %s\n", error.what());
    return 1;
  }
}
