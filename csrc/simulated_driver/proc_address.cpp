// cuGetProcAddress, v1 and v2. Which function a name means from which CUDA version on, hook/entry_points.txt says.
#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <string_view>

#include "base/loader.h"
#include "hook/entry_points.hpp"
#include "simulated_driver/driver.hpp"
#include "simulated_driver/future.hpp"

namespace cudasched::simulated_driver {
namespace {

template <class F>
void* address(F* function) {
  return reinterpret_cast<void*>(function);
}

// Functions that no header has, or that the library does not export.
struct Unlisted {
  std::string_view name;
  int since;
  void* function;
};
const std::array kUnlisted{
    Unlisted{"cuFutureBeginCapture", 15000, address(future_begin_capture)},
    Unlisted{"cuMemsetD16Async", 3020, address(fill_16)},
    Unlisted{"cuMemsetD32Async", 15000, address(future_fill)},
};

// Null: this driver has no such function.
void* exported(std::string_view symbol) {
  static void* const self = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(&exported), &info);
    return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  return symbol.empty() ? nullptr : cudasched_loader_find(self, symbol.data());
}

struct Found {
  void* function = nullptr;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
};

Found find_entry(std::string_view name, int version, bool per_thread) {
  Found found;
  int newest = 0;
  const auto look = [&](std::string_view known_as, int since, auto&& function) {
    if (known_as != name || since <= newest || since > driver_version()) return;
    void* const here = function();
    if (here == nullptr) return;
    if (since > version) {
      if (found.function == nullptr) found.status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
      return;
    }
    newest = since;
    found = {here, CU_GET_PROC_ADDRESS_SUCCESS};
  };
  for (const Unlisted& each : kUnlisted) look(each.name, each.since, [&] { return each.function; });
  for (const hook::EntryPoint& point : hook::entry_points()) {
    const auto function = [&] {
      void* const twin = per_thread && version >= hook::kTwinsSince ? exported(point.twin) : nullptr;
      return twin != nullptr ? twin : exported(point.symbol);
    };
    look(point.name, point.since, function);
    look(point.alias, point.alias_since, function);
  }
  return found;
}

CUresult get_address(const char* symbol, void** function, int version, cuuint64_t flags, Found& found) {
  constexpr cuuint64_t kKnown = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  if (symbol == nullptr || *symbol == '\0' || function == nullptr || (flags & ~kKnown) != 0 || flags == kKnown ||
      version <= 0 || version > driver_version()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  found = find_entry(symbol, version, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0);
  *function = found.function;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cudasched::simulated_driver

#pragma GCC visibility push(default)
extern "C" {

using namespace cudasched::simulated_driver;

CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags) {
  Found found;
  const CUresult result = get_address(symbol, function, version, flags, found);
  if (result != CUDA_SUCCESS) return result;
  return found.function == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  Found found;
  const CUresult result = get_address(symbol, function, version, flags, found);
  if (result == CUDA_SUCCESS && status != nullptr) *status = found.status;
  return result;
}

}  // extern "C"
#pragma GCC visibility pop
