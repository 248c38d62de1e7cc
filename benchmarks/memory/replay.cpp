// Replays a history of allocations with an allocator, and times allocations of sizes that it has free. Prints JSON.
//   replay pool|async HISTORY|hot
// HISTORY has a line "IDENTITY BYTES" for each allocation and "IDENTITY 0" for each free.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/loader.h"
#include "driver/driver.hpp"
#include "memory/pool.hpp"

// As csrc/base/loader.c, which is C, where no other library answers for dlsym.
void* cudasched_loader_find(void* handle, const char* name) { return dlsym(handle, name); }

namespace {

using namespace cudasched;
using driver::check;
using driver::table;

struct Allocator {
  std::function<CUdeviceptr(std::size_t)> allocate;
  std::function<void(CUdeviceptr)> free;
  std::function<std::uint64_t()> peak_reserved;
};

Allocator of_pool(CUstream stream) {
  const auto pool = std::make_shared<memory::Pool>(memory::Pool::Options{});
  return {[=](std::size_t bytes) { return pool->allocate(bytes, stream); },
          [=](CUdeviceptr address) { pool->free(address, stream); }, [=] { return pool->statistics().peak_reserved; }};
}

// The device's default pool, which keeps all that it has.
Allocator of_driver(CUstream stream, void* library) {
  const auto set = reinterpret_cast<decltype(&cuMemPoolSetAttribute)>(dlsym(library, "cuMemPoolSetAttribute"));
  CUmemoryPool pool = nullptr;
  check("cuDeviceGetMemPool", table().cuDeviceGetMemPool(&pool, 0));
  cuuint64_t all = UINT64_MAX;
  if (set != nullptr) check("cuMemPoolSetAttribute", set(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
  const auto peak = std::make_shared<cuuint64_t>(0);
  const auto look = [=] {
    cuuint64_t now = 0;
    table().cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &now);
    *peak = std::max(*peak, now);
    return *peak;
  };
  return {[=](std::size_t bytes) {
            CUdeviceptr address = 0;
            check("cuMemAllocAsync", table().cuMemAllocAsync.legacy(&address, bytes, stream));
            return address;
          },
          [=](CUdeviceptr address) {
            look();
            check("cuMemFreeAsync", table().cuMemFreeAsync.legacy(address, stream));
          },
          look};
}

void replay(const Allocator& with, const char* path) {
  std::FILE* const file = std::fopen(path, "r");
  if (file == nullptr) throw Error("no history");
  std::unordered_map<long, std::pair<CUdeviceptr, std::size_t>> live;
  std::uint64_t used = 0;
  std::uint64_t peak = 0;
  const auto began = std::chrono::steady_clock::now();
  long identity = 0;
  std::size_t bytes = 0;
  while (std::fscanf(file, "%ld %zu", &identity, &bytes) == 2) {
    if (bytes != 0) {
      live[identity] = {with.allocate(bytes), bytes};
      peak = std::max(peak, used += bytes);
    } else {
      used -= live.at(identity).second;
      with.free(live.at(identity).first);
      live.erase(identity);
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::fclose(file);
  std::printf("{\"used\": %llu, \"reserved\": %llu, \"s\": %.4f}\n", static_cast<unsigned long long>(peak),
              static_cast<unsigned long long>(with.peak_reserved()), took.count());
}

// ns an allocation and a free, for each of some sizes: the median of batches.
void time_hot(const Allocator& with) {
  constexpr int kBlocks = 64;
  constexpr int kBatches = 400;
  std::printf("{\"ns\": [");
  const char* comma = "";
  for (const std::size_t bytes : {std::size_t{512}, std::size_t{1} << 20, std::size_t{20} << 20}) {
    std::vector<double> allocations;
    std::vector<double> frees;
    std::vector<CUdeviceptr> blocks(kBlocks);
    for (int batch = 0; batch < kBatches; ++batch) {
      const auto begin = std::chrono::steady_clock::now();
      for (CUdeviceptr& block : blocks) block = with.allocate(bytes);
      const auto middle = std::chrono::steady_clock::now();
      for (const CUdeviceptr block : blocks) with.free(block);
      const auto end = std::chrono::steady_clock::now();
      allocations.push_back(std::chrono::duration<double, std::nano>(middle - begin).count() / kBlocks);
      frees.push_back(std::chrono::duration<double, std::nano>(end - middle).count() / kBlocks);
    }
    for (std::vector<double>* const each : {&allocations, &frees}) {
      std::sort(each->begin(), each->end());
      std::printf("%s%.1f", comma, (*each)[kBatches / 2]);
      comma = ", ";
    }
  }
  std::printf("]}\n");
}

}  // namespace

int main(int count, char** arguments) try {
  if (count != 3) return 2;
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) throw Error("there is no libcuda.so.1");
  driver::driver_table.load(library);
  check("cuInit", table().cuInit(0));
  CUcontext context = nullptr;
  check("cuDevicePrimaryCtxRetain", table().cuDevicePrimaryCtxRetain(&context, 0));
  check("cuCtxSetCurrent", table().cuCtxSetCurrent(context));
  CUstream stream = nullptr;
  check("cuStreamCreate", table().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  const Allocator with = std::strcmp(arguments[1], "pool") == 0 ? of_pool(stream) : of_driver(stream, library);
  std::strcmp(arguments[2], "hot") == 0 ? time_hot(with) : replay(with, arguments[2]);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
