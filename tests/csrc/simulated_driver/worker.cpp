// A program that uses the simulated driver, for the tests with several processes. Its arguments:
//   appends COUNT BLOCK_US   launches COUNT appending kernels on three streams, checks their order, prints "done N"
//   forever BLOCK_US         prints "ready", then launches without end on several streams, with copies and waits
//   inside                   uses the shared device below the driver, nearly always inside its lock, prints "ready"
//   contexts                 prints "ready" when it has a context with queued work, then waits for its death
#include <cuda.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "simulated_driver/shared_device.hpp"

namespace {

constexpr const char* kImage =
    "cudasched-sim 1\n"
    "kernel append params=8,8,8,4 block_us=param:3 effect=append\n"
    "kernel spin params=4 block_us=param:0\n";

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* name = "?";
  cuGetErrorName(result, &name);
  std::fprintf(stderr, "%s: %s\n", what, name);
  std::exit(3);
}

struct Setup {
  CUfunction append = nullptr;
  CUfunction spin = nullptr;
  CUstream streams[3] = {};

  Setup() {
    check(cuInit(0), "cuInit");
    CUcontext context = nullptr;
    check(cuDevicePrimaryCtxRetain(&context, 0), "retain");
    check(cuCtxSetCurrent(context), "set current");
    CUmodule module = nullptr;
    check(cuModuleLoadData(&module, kImage), "load");
    check(cuModuleGetFunction(&append, module, "append"), "append");
    check(cuModuleGetFunction(&spin, module, "spin"), "spin");
    for (CUstream& stream : streams) check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "stream");
  }
};

int appends(std::uint64_t count, std::uint32_t block_us) {
  const Setup setup;
  CUdeviceptr logs[3];
  CUdeviceptr cursors[3];
  for (int s = 0; s < 3; ++s) {
    check(cuMemAlloc(&logs[s], count * 8), "alloc");
    check(cuMemAlloc(&cursors[s], 8), "alloc");
    check(cuMemsetD8Async(cursors[s], 0, 8, setup.streams[s]), "memset");
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto s = static_cast<int>(i % 3);
    void* params[] = {&logs[s], &cursors[s], &i, &block_us};
    check(cuLaunchKernel(setup.append, 140, 1, 1, 64, 1, 1, 0, setup.streams[s], params, nullptr), "launch");
  }
  check(cuCtxSynchronize(), "synchronize");
  std::uint64_t total = 0;
  for (int s = 0; s < 3; ++s) {
    std::uint64_t entries = 0;
    check(cuMemcpyDtoH(&entries, cursors[s], 8), "copy");
    std::vector<std::uint64_t> log(entries);
    if (entries != 0) check(cuMemcpyDtoH(log.data(), logs[s], entries * 8), "copy");
    for (std::uint64_t i = 0; i < entries; ++i) {
      if (log[i] != i * 3 + static_cast<std::uint64_t>(s)) return 4;
    }
    total += entries;
  }
  std::printf("done %llu\n", static_cast<unsigned long long>(total));
  return total == count ? 0 : 5;
}

int forever(std::uint32_t block_us) {
  const Setup setup;
  CUdeviceptr memory = 0;
  check(cuMemAlloc(&memory, 1 << 16), "alloc");
  CUevent event = nullptr;
  check(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "event");
  std::printf("ready\n");
  std::fflush(stdout);
  for (std::uint64_t i = 0;; ++i) {
    CUstream stream = setup.streams[i % 3];
    void* params[] = {&block_us};
    check(cuLaunchKernel(setup.spin, 100 + i % 300, 1, 1, 64, 1, 1, 0, stream, params, nullptr), "launch");
    if (i % 5 == 0) check(cuMemsetD8Async(memory, 1, 1 << 16, stream), "memset");
    if (i % 7 == 0) {
      check(cuEventRecord(event, stream), "record");
      check(cuStreamWaitEvent(setup.streams[(i + 1) % 3], event, 0), "wait");
    }
    cuStreamQuery(stream);
  }
}

int inside() {
  using namespace cudasched::simulated_driver;
  static SharedDevice shared;
  if (shared.open(std::getenv("CUDASCHED_SIM_DIR"), 0, 1) != 0) return 3;
  std::mt19937 random(static_cast<unsigned>(getpid()));
  int context = -1;
  int streams[4];
  {
    SharedDevice::Guard device(shared);
    if (shared.create_context(device, &context) != Status::kOk) return 3;
    for (int& stream : streams) {
      if (device->create_stream(context, &stream) != Status::kOk) return 3;
    }
  }
  std::printf("ready\n");
  std::fflush(stdout);
  Ticket last = 0;
  for (;;) {
    {
      SharedDevice::Guard device(shared);
      for (int i = 0; i < 300; ++i) {
        Work work{
            .kind = static_cast<OpKind>(random() % 4),
            .blocks = 1 + random() % 500,
        };
        work.blocks_per_sm = static_cast<std::uint32_t>(1 + random() % 8);
        work.block_ns = 500 + random() % 5000;
        work.wait_for = last;
        device->submit(context, streams[random() % 4], work, &last);
        device->advance(shared.simulated_now_ns());
        for (Completion done; random() % 4 != 0 && device->take_completed(context, &done);) {
        }
        if (i % 100 == 99 && random() % 4 == 0) device->rebuild();
      }
    }
    usleep(20);
  }
}

int contexts() {
  const Setup setup;
  std::uint32_t block_us = 100'000'000;
  void* params[] = {&block_us};
  for (int i = 0; i < 20; ++i) {
    check(cuLaunchKernel(setup.spin, 132, 1, 1, 64, 1, 1, 0, setup.streams[0], params, nullptr), "launch");
  }
  std::printf("ready\n");
  std::fflush(stdout);
  for (;;) pause();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "appends" && argc == 4) {
    return appends(std::strtoull(argv[2], nullptr, 10), static_cast<std::uint32_t>(std::strtoul(argv[3], nullptr, 10)));
  }
  if (what == "forever" && argc == 3) return forever(static_cast<std::uint32_t>(std::strtoul(argv[2], nullptr, 10)));
  if (what == "inside") return inside();
  if (what == "contexts") return contexts();
  return 2;
}
