// The collect part of cudasched._core.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <optional>
#include <string>

#include "bindings/bindings.hpp"
#include "cudasched/engine.h"

namespace cudasched::bindings {
namespace py = pybind11;

void bind_collect(py::module_& module) {
  module.def(
      "collect_start",
      [](const std::filesystem::path& directory, const std::string& timing,
         const std::optional<std::filesystem::path>& cupti_path, std::uint64_t capacity_bytes) {
        check_unlocked([&] {
          return cudasched_collect_start(directory.c_str(), timing.c_str(), cupti_path ? cupti_path->c_str() : nullptr,
                                         capacity_bytes);
        });
      },
      py::arg("directory"), py::arg("timing"), py::arg("cupti_path"), py::arg("capacity_bytes"));
  module.def("collect_stop", [] {
    cudasched_collected collected{};
    check_unlocked([&] { return cudasched_collect_stop(&collected); });
    return py::make_tuple(text_of(collected.journal, "surrogateescape"), collected.rows, collected.lost);
  });
  module.def(
      "trace_start",
      [](const std::filesystem::path& directory, std::uint64_t limit_bytes) {
        check_unlocked([&] { return cudasched_trace_start(directory.c_str(), limit_bytes); });
      },
      py::arg("directory"), py::arg("limit_bytes"));
  module.def("trace_stop", [] {
    cudasched_traced traced{};
    check_unlocked([&] { return cudasched_trace_stop(&traced); });
    return py::make_tuple(text_of(traced.base, "surrogateescape"), traced.records, traced.dropped, traced.rotated_away);
  });
  module.def(
      "collect_label",
      [](const std::string& text) { check_unlocked([&] { return cudasched_collect_label(text.c_str()); }); },
      py::arg("text"));
}

}  // namespace cudasched::bindings
