// What tracing adds to one launch on the host: a deferred launch has two records, the program's call and the launcher
// thread's, and a launch that is made directly has one. Each is what csrc/runtime/tracing.cpp puts: two looks at the
// clock, the kernel's description looked up by its handle, and a place in a ring that a thread empties meanwhile.
//
//   trace BATCHES OFF_OR_ON DIRECTORY   prints ns a launch, one line a batch; then "dropped N" and "bytes N"
#include "telemetry/trace.hpp"

#include <time.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/clock.hpp"
#include "base/handle_table.hpp"
#include "driver/functions.hpp"

namespace {

using cudasched::now_ns;
namespace telemetry = cudasched::telemetry;

cudasched::HandleTable<3> handles;
cudasched::driver::KernelFacts kernel;
std::array<cudasched::predict::Launch, 65> shapes;

std::int64_t cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * cudasched::kNsPerSecond + time.tv_nsec;
}

// As runtime::trace_launch() and trace_push().
[[gnu::noinline]] void record(telemetry::TraceKind kind, std::uint64_t handle, std::int64_t begin_ns,
                              std::uint16_t thread) {
  telemetry::TraceRecord made;
  made.kind = kind;
  made.time_ns = begin_ns;
  made.lasts(now_ns() - begin_ns);
  made.stream = 0x1000;
  made.at(cudasched::Class::kBestEffort, 0);
  made.region = 3;
  made.thread = thread;
  made.predicts(20'000);
  cudasched::HandleTable<3>::Words words{};
  if (handles.find(handle, words)) {
    made.what = words[0];
    if (kind == telemetry::TraceKind::kLaunch) made.has_shape(telemetry::trace_shape(shapes[handle >> 8]));
  }
  telemetry::put(made);
}

void launch(std::uint64_t handle) {
  const std::int64_t pushed_ns = telemetry::traced_now();
  if (pushed_ns != 0) record(telemetry::TraceKind::kPush, handle, pushed_ns, 1);
  const std::int64_t made_ns = telemetry::traced_now();
  if (made_ns != 0) record(telemetry::TraceKind::kLaunch, handle, made_ns, 2);
}

}  // namespace

int main(int, char** arguments) {
  constexpr std::uint64_t kLaunches = 1'000;
  kernel.name = "kernel";
  for (std::uint64_t i = 1; i <= 64; ++i) {
    shapes[i].grid[0] = static_cast<std::uint32_t>(i);
    handles.set(i << 8, {reinterpret_cast<std::uintptr_t>(&kernel), i, 0});
  }
  if (std::strcmp(arguments[2], "on") == 0) telemetry::start_tracing({arguments[3]});
  for (int batch = std::atoi(arguments[1]); batch > 0; --batch) {
    const std::int64_t begin = cpu_ns();
    for (std::uint64_t i = 0; i < kLaunches; ++i) launch((i % 64 + 1) << 8);
    std::printf("%.4f\n", static_cast<double>(cpu_ns() - begin) / static_cast<double>(kLaunches));
    // As many launches a second as a program may make, so that nothing is dropped.
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
  }
  const telemetry::Traced done = telemetry::stop_tracing();
  std::printf("dropped %llu\nbytes %zu\n", static_cast<unsigned long long>(done.dropped),
              sizeof(telemetry::TraceRecord) + sizeof(std::uint64_t));
}
