// `_core.MemoryPool`: the face of csrc/memory, and the two functions by which PyTorch's pluggable allocator takes a
// device's memory from a pool (python/cudasched/memory.py).
#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include "base/log.hpp"
#include "bindings/bindings.hpp"
#include "cudasched/engine.h"
#include "driver/driver.hpp"
#include "memory/pool.hpp"

namespace py = pybind11;

namespace cudasched::bindings {
namespace {

using memory::Pool;
// Of no constructor: an object is noted in a table that the GIL guards.
using Unlocked = py::call_guard<py::gil_scoped_release>;

CUstream stream_of(std::uint64_t handle) { return reinterpret_cast<CUstream>(handle); }

// Through the shim where cudasched is installed, so that the hook counts a pool's memory as any other.
void load_driver() {
  static const bool loaded = [] {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) throw memory::PoolError("there is no NVIDIA driver here: libcuda.so.1 is not found");
    driver::driver_table.load(library);
    return true;
  }();
  (void)loaded;
}

void trim(void* pool) {
  try {
    static_cast<Pool*>(pool)->trim();
  } catch (const std::exception& error) {  // closed, or a call of the driver failed: it gives nothing
    log::debug(error.what());
  }
}

int read(void* pool, cudasched_pool_sizes* sizes) {
  const auto now = static_cast<Pool*>(pool)->look();
  if (now) *sizes = {now->reserved, now->allocated, now->largest_free};
  return now ? 1 : 0;
}

// The engine knows of it until its end.
std::shared_ptr<Pool> make_pool(int device, std::uint64_t limit_bytes, std::uint64_t chunk_bytes) {
  const py::gil_scoped_release released;
  load_driver();
  auto made = std::make_unique<Pool>(Pool::Options{device, limit_bytes, chunk_bytes});
  const cudasched_pool known{device, made.get(), &trim, &read};
  cudasched_add_pool(&known);
  return {made.release(), [](Pool* pool) {
            const py::gil_scoped_release unlocked;  // it waits for work, which may be a function of Python
            cudasched_remove_pool(pool);
            delete pool;
          }};
}

// A device's pool for PyTorch. It is kept for good: PyTorch may free memory when the interpreter is gone.
constexpr int kDevices = 64;
std::array<std::atomic<std::shared_ptr<Pool>*>, kDevices> torch_pools{};

void serve_torch(const std::shared_ptr<Pool>& pool) {
  if (pool->device() >= kDevices) throw memory::PoolError("PyTorch can use pools of devices 0 to 63 alone");
  auto& place = torch_pools[static_cast<std::size_t>(pool->device())];
  auto* const served = place.load();
  if (pool->is_closed()) throw memory::PoolError("the pool of device " + std::to_string(pool->device()) + " is closed");
  if (served != nullptr && *served == pool) return;
  if (served != nullptr && !(*served)->is_closed()) {
    throw memory::PoolError("another pool of device " + std::to_string(pool->device()) +
                            " serves PyTorch in this process; close that one first");
  }
  place.store(new std::shared_ptr<Pool>(pool));
}

Pool& torch_pool(int device) {
  auto* const served =
      device < 0 || device >= kDevices ? nullptr : torch_pools[static_cast<std::size_t>(device)].load();
  if (served == nullptr) throw memory::PoolError("no pool of device " + std::to_string(device) + " serves PyTorch");
  return **served;
}

void translate_memory_errors(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(std::move(thrown));
  } catch (const memory::OutOfMemoryError& error) {
    set_error("OutOfMemoryError", error.what(), "cudasched.memory");
  } catch (const memory::PoolError& error) {
    set_error("PoolError", error.what(), "cudasched.memory");
  } catch (const driver::DriverError& error) {
    set_error("DriverError", error.what());
  }
}

}  // namespace

void bind_memory(py::module_& module) {
  using memory::Statistics;
  py::register_local_exception_translator(&translate_memory_errors);

  py::class_<Statistics>(module, "MemoryStatistics")
      .def_readonly("reserved", &Statistics::reserved)
      .def_readonly("allocated", &Statistics::allocated)
      .def_readonly("largest_free", &Statistics::largest_free)
      .def_property_readonly("fragmentation", &Statistics::fragmentation)
      .def_readonly("peak_reserved", &Statistics::peak_reserved)
      .def_readonly("peak_allocated", &Statistics::peak_allocated)
      .def_readonly("blocks", &Statistics::blocks)
      .def_readonly("created", &Statistics::created)
      .def_readonly("moved", &Statistics::moved);

  py::class_<Pool, std::shared_ptr<Pool>>(module, "MemoryPool")
      .def(py::init(&make_pool), py::arg("device"), py::arg("limit_bytes"), py::arg("chunk_bytes"))
      .def(
          "allocate",
          [](Pool& self, std::uint64_t bytes, std::uint64_t stream) -> std::uint64_t {
            return self.allocate(bytes, stream_of(stream));
          },
          py::arg("nbytes"), py::arg("stream"), Unlocked())
      .def(
          "free",
          [](Pool& self, std::uint64_t address, std::uint64_t stream) { self.free(address, stream_of(stream)); },
          py::arg("address"), py::arg("stream"), Unlocked())
      .def("trim", &Pool::trim, py::arg("keep_bytes"), Unlocked())
      .def("statistics", &Pool::statistics, Unlocked())
      .def("close", &Pool::close, Unlocked())
      .def("serve_torch", &serve_torch);
}

}  // namespace cudasched::bindings

// Null: PyTorch takes that for a full GPU, empties its caches and asks once more.
extern "C" __attribute__((visibility("default"))) void* cudasched_pool_allocate(std::size_t bytes, int device,
                                                                                void* stream) {
  try {
    auto& pool = cudasched::bindings::torch_pool(device);
    return reinterpret_cast<void*>(pool.allocate(bytes, static_cast<CUstream>(stream)));
  } catch (const cudasched::memory::OutOfMemoryError&) {
    return nullptr;
  } catch (const std::exception& error) {
    cudasched::log::error(error.what());
    return nullptr;
  }
}

extern "C" __attribute__((visibility("default"))) void cudasched_pool_free(void* address, std::size_t /*bytes*/,
                                                                           int device, void* stream) {
  try {
    auto& pool = cudasched::bindings::torch_pool(device);
    pool.free(reinterpret_cast<CUdeviceptr>(address), static_cast<CUstream>(stream));
  } catch (const std::exception& error) {
    cudasched::log::error(error.what());  // the block stays in use
  }
}
