// Python's face of the C boundary (include/cudasched/engine.h), nothing more: statuses become exceptions of
// cudasched.errors, classes become names. Meaning, defaults and documentation are python/cudasched's.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "cudasched/engine.h"
#include "faces.hpp"

namespace py = pybind11;

namespace {

using cudasched::bindings::check;
using cudasched::bindings::check_unlocked;
using cudasched::bindings::raise;
using cudasched::bindings::text_of;

constexpr std::array kClassNames{"normal", "latency", "best_effort"};

std::string class_name(std::int32_t value) {
  return value >= 0 && static_cast<std::size_t>(value) < kClassNames.size()
             ? kClassNames[static_cast<std::size_t>(value)]
             : "unknown";
}

py::str path_by(int (*call)(char* path, std::size_t room)) {
  std::array<char, 4096> path{};
  check(call(path.data(), path.size()));
  return text_of(path.data(), "surrogateescape");
}

// Of a function whose last argument points to a place for it.
template <typename Value, typename Call, typename... Arguments>
Value value_of(Call call, Arguments... arguments) {
  Value value{};
  check(call(arguments..., &value));
  return value;
}

std::int32_t class_number(const std::string& name) {
  for (std::size_t i = 0; i < kClassNames.size(); ++i) {
    if (name == kClassNames[i]) return static_cast<std::int32_t>(i);
  }
  raise("ConfigError", "class '" + name + "' is unknown; there are latency, normal and best_effort");
}

// Calls function(begun, *arguments) with an empty list, and after an exception once more with the list as filled. A
// signal handler's exception may come at any bytecode, and the first error goes on.
PyObject* call_to_its_end(PyObject* function, PyObject* const* arguments, Py_ssize_t count) {
  std::array<PyObject*, 8> all{};
  if (static_cast<std::size_t>(count) >= all.size()) return PyErr_Format(PyExc_TypeError, "too many arguments");
  const py::list begun;
  all[0] = begun.ptr();
  std::copy_n(arguments, count, all.begin() + 1);
  const auto again = [&] {
    return py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(function, all.data(), static_cast<std::size_t>(count + 1), nullptr));
  };
  py::object result = again();
  if (!result) {
    const py::error_scope first;
    // The program may have come to the limit of recursion.
    constexpr int kRoom = 32;
    const int limit = Py_GetRecursionLimit();
    const bool needs_room = PyErr_GivenExceptionMatches(first.type, PyExc_RecursionError) != 0;
    if (needs_room) Py_SetRecursionLimit(limit + kRoom);
    if (!again()) PyErr_Clear();
    if (needs_room) Py_SetRecursionLimit(limit);
  }
  return result.release().ptr();
}

// A method that does so.
py::object to_its_end(const py::function& function) {
  static PyMethodDef definition{"to_its_end", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_to_its_end)),
                                METH_FASTCALL, nullptr};
  const auto call = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, function.ptr()));
  return py::reinterpret_steal<py::object>(PyInstanceMethod_New(call.ptr()));
}

using Clients = std::pair<std::string, std::vector<std::pair<cudasched_client, std::optional<cudasched_counts>>>>;

Clients read_counts(const std::string& path) {
  std::vector<cudasched_client> clients(64);
  std::vector<cudasched_counts> counts(64);
  std::int32_t count = 0;
  std::array<char, 64> device_name{};
  check(cudasched_read_counts(path.c_str(), clients.data(), counts.data(), 64, &count, device_name.data()));
  Clients found;
  for (std::size_t i = 0; i < std::min<std::size_t>(static_cast<std::size_t>(count), clients.size()); ++i) {
    std::optional<cudasched_counts> known;
    if (counts[i].process != 0) known = counts[i];
    found.second.emplace_back(clients[i], std::move(known));
  }
  found.first = device_name.data();
  return found;
}

std::pair<std::vector<std::uint64_t>, std::uint64_t> times_of(const cudasched_times& times) {
  return {{std::begin(times.buckets), std::end(times.buckets)}, times.sum_ns};
}

template <typename Struct, typename Field>
auto flag(Field Struct::*field) {
  return [field](const Struct& self) { return self.*field != 0; };
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ engine of cudasched; use the functions of the package cudasched instead.";
  cudasched::bindings::bind_faces(module);

  py::class_<cudasched_state>(module, "State")
      .def_property_readonly("attached", flag(&cudasched_state::attached))
      .def_property_readonly("scheduling", flag(&cudasched_state::scheduling))
      .def_property_readonly("process_class", [](const cudasched_state& s) { return class_name(s.process_class); })
      .def_readonly("driver_version", &cudasched_state::driver_version)
      .def_readonly("unknown_handles", &cudasched_state::unknown_handles)
      .def_readonly("graphs_sliced", &cudasched_state::graphs_sliced)
      .def_readonly("graph_slices", &cudasched_state::graph_slices)
      .def_readonly("graph_slice_bytes", &cudasched_state::graph_slice_bytes)
      .def_readonly("graph_builds", &cudasched_state::graph_builds)
      .def_readonly("graph_build_ns", &cudasched_state::graph_build_ns)
      .def_readonly("graph_slices_dropped", &cudasched_state::graph_slices_dropped)
      .def_readonly("longest_whole_graph_ns", &cudasched_state::longest_whole_graph_ns)
      .def_property_readonly("graphs_whole",
                             [](const cudasched_state& s) {
                               std::map<std::string, std::uint64_t> by_reason;
                               for (int i = 0; i < CUDASCHED_WHOLE_REASONS; ++i) {
                                 if (s.graphs_whole[i] != 0) by_reason[cudasched_whole_reason(i)] = s.graphs_whole[i];
                               }
                               return by_reason;
                             })
      .def_property_readonly("off_reason", [](const cudasched_state& s) { return text_of(s.off_reason); })
      .def_property_readonly("driver_path", [](const cudasched_state& s) { return text_of(s.driver_path); });

  py::class_<cudasched_client>(module, "Client")
      .def_readonly("slot", &cudasched_client::slot)
      .def_property_readonly("client_class", [](const cudasched_client& c) { return class_name(c.client_class); })
      .def_readonly("priority", &cudasched_client::priority)
      .def_readonly("pid", &cudasched_client::pid)
      .def_property_readonly("alive", flag(&cudasched_client::alive))
      .def_property_readonly("active", flag(&cudasched_client::active))
      .def_property_readonly("waiting", flag(&cudasched_client::waiting))
      .def_readonly("regions", &cudasched_client::regions)
      .def_property_readonly("hook_attached", flag(&cudasched_client::hook_attached))
      .def_readonly("age_ns", &cudasched_client::age_ns)
      .def_readonly("heartbeat_age_ns", &cudasched_client::heartbeat_age_ns)
      .def_readonly("active_since_ns", &cudasched_client::active_since_ns)
      .def_readonly("slo_ns", &cudasched_client::slo_ns)
      .def_readonly("in_flight_ns", &cudasched_client::in_flight_ns)
      .def_readonly("overdue_ns", &cudasched_client::overdue_ns)
      .def_readonly("policy_ns", &cudasched_client::policy_ns)
      .def_readonly("deadline_in_ns", &cudasched_client::deadline_in_ns)
      .def_readonly("launches", &cudasched_client::launches)
      .def_readonly("device_launches", &cudasched_client::device_launches)
      .def_readonly("gate_waits", &cudasched_client::gate_waits)
      .def_readonly("gate_wait_ns", &cudasched_client::gate_wait_ns)
      .def_readonly("process", &cudasched_client::process)
      .def_readonly("normal_beside_best_effort", &cudasched_client::normal_beside_best_effort)
      .def_readonly("memory_bytes", &cudasched_client::memory_bytes)
      .def_readonly("memory_peak_bytes", &cudasched_client::memory_peak_bytes)
      .def_readonly("memory_limit_bytes", &cudasched_client::memory_limit_bytes)
      .def_readonly("memory_away_bytes", &cudasched_client::memory_away_bytes)
      .def_readonly("memory_given_bytes", &cudasched_client::memory_given_bytes)
      .def_readonly("memory_refusals", &cudasched_client::memory_refusals)
      .def_readonly("pool_reserved_bytes", &cudasched_client::pool_reserved_bytes)
      .def_readonly("pool_allocated_bytes", &cudasched_client::pool_allocated_bytes)
      .def_readonly("pool_largest_free_bytes", &cudasched_client::pool_largest_free_bytes)
      .def_property_readonly("process_class", [](const cudasched_client& c) { return class_name(c.process_class); })
      .def_readonly("weight_milli", &cudasched_client::weight_milli)
      .def_readonly("time_slice_us", &cudasched_client::time_slice_us)
      .def_readonly("time_slice_state", &cudasched_client::time_slice_state)
      .def_property_readonly("policy", [](const cudasched_client& c) { return std::string(c.policy); })
      .def_property_readonly("name", [](const cudasched_client& c) { return text_of(c.name); })
      .def_property_readonly("version", [](const cudasched_client& c) { return text_of(c.version); });

  py::class_<cudasched_region_counts>(module, "RegionCounts")
      .def_property_readonly("name", [](const cudasched_region_counts& r) { return text_of(r.name); })
      .def_readonly("slo_ns", &cudasched_region_counts::slo_ns)
      .def_readonly("met", &cudasched_region_counts::met)
      .def_readonly("missed", &cudasched_region_counts::missed)
      .def_property_readonly("times", [](const cudasched_region_counts& r) { return times_of(r.times); });

  py::class_<cudasched_counts>(module, "Counts")
      .def_property_readonly("numbers",
                             [](const cudasched_counts& c) {
                               py::dict numbers;
#define CUDASCHED_NUMBER(name, metric, text) numbers[#name] = c.name;
#include "cudasched/counts.inc"
                               return numbers;
                             })
#define CUDASCHED_LIST(name, entries, metric, text)                          \
  .def_property_readonly(#name, [](const cudasched_counts& c) {              \
    return std::vector<std::uint64_t>(std::begin(c.name), std::end(c.name)); \
  })
#define CUDASCHED_TIMES(name, metric, text) \
  .def_property_readonly(#name, [](const cudasched_counts& c) { return times_of(c.name); })
#include "cudasched/counts.inc"
      .def_property_readonly("regions",
                             [](const cudasched_counts& c) {
                               // Those that had a request.
                               std::vector<cudasched_region_counts> found;
                               std::copy_if(std::begin(c.regions), std::end(c.regions), std::back_inserter(found),
                                            [](const cudasched_region_counts& region) {
                                              return std::any_of(std::begin(region.times.buckets),
                                                                 std::end(region.times.buckets),
                                                                 [](std::uint64_t times) { return times != 0; });
                                            });
                               return found;
                             })
      .def_property_readonly("whole_graphs", [](const cudasched_counts& c) {
        // Of the reasons that some graph stays whole for: how many graphs, ns and nodes of the longest.
        std::map<std::string, std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> by_reason;
        for (int i = 0; i < CUDASCHED_WHOLE_REASONS; ++i) {
          const cudasched_whole_graphs& whole = c.whole[i];
          if (whole.graphs == 0) continue;
          by_reason[cudasched_whole_reason(i)] = {whole.graphs, whole.longest_ns, whole.longest_nodes};
        }
        return by_reason;
      });

  module.def("counted", [] {
    py::dict all;
#define CUDASCHED_NUMBER(name, metric, text) all[#name] = py::make_tuple(metric, text);
#define CUDASCHED_LIST(name, entries, metric, text) CUDASCHED_NUMBER(name, metric, text)
#define CUDASCHED_TIMES CUDASCHED_NUMBER
#include "cudasched/counts.inc"
    return all;
  });
  module.def("version", [] { return std::string(cudasched_version()); });
  module.def("find_driver", [] { return path_by(&cudasched_find_driver); });
  module.def("install", [] { check(cudasched_install()); });
  module.def("state", [] {
    cudasched_state state{};
    cudasched_get_state(&state);
    return state;
  });
  module.def(
      "set_process_class",
      [](const std::string& name, std::int32_t priority, double slo_ms) {
        check(cudasched_set_process_class(class_number(name), priority, slo_ms));
      },
      py::arg("name"), py::arg("priority"), py::arg("slo_ms"));
  module.def(
      "region_enter",
      [](const std::string& name, std::int32_t priority, double slo_ms, const std::string& counted_as) {
        return value_of<std::uint64_t>(&cudasched_region_enter_named, class_number(name), priority, slo_ms,
                                       counted_as.empty() ? nullptr : counted_as.c_str());
      },
      py::arg("name"), py::arg("priority"), py::arg("slo_ms"), py::arg("counted_as"));
  module.def(
      "region_enter_until",
      [](const std::string& name, std::int32_t priority, std::int64_t deadline_ns) {
        return value_of<std::uint64_t>(&cudasched_region_enter_until, class_number(name), priority, deadline_ns);
      },
      py::arg("name"), py::arg("priority"), py::arg("deadline_ns"));
  module.def("region_exit", [](std::uint64_t token) { check(cudasched_region_exit(token)); }, py::arg("token"));
  module.def("region_may_move", [](std::uint64_t token) { check(cudasched_region_may_move(token)); }, py::arg("token"));
  module.def(
      "region_end_elsewhere", [](std::uint64_t token) { check(cudasched_region_end_elsewhere(token)); },
      py::arg("token"));
  module.def("to_its_end", &to_its_end, py::arg("function"));
  module.def("finish", &cudasched_finish, py::call_guard<py::gil_scoped_release>());
  module.def("expect", [](double within_ms) { check(cudasched_expect(within_ms)); }, py::arg("within_ms"));
  module.def(
      "measure",
      [](double pause_ms) {
        const auto found = value_of<cudasched_measuring>(&cudasched_measure, pause_ms);
        return py::make_tuple(found.wait_ns, found.busy_ns, found.latency_since_ns, found.latency_active != 0);
      },
      py::arg("pause_ms"));
  module.def(
      "bind_stream",
      [](std::uint64_t stream, const std::string& name) { check(cudasched_bind_stream(stream, class_number(name))); },
      py::arg("stream"), py::arg("name"));
  module.def(
      "order",
      [](std::uint64_t stream, const py::tuple& ahead, bool yields) {
        std::vector<cudasched_ahead> pairs(ahead.size() / 2);
        for (std::size_t i = 0; i < pairs.size(); ++i) {
          pairs[i] = {ahead[2 * i].cast<std::uint64_t>(), ahead[2 * i + 1].cast<std::uint64_t>()};
        }
        const auto order = [&] {
          return cudasched_order(stream, pairs.data(), static_cast<std::int32_t>(pairs.size()));
        };
        // Given up, it is another thread's for milliseconds; kept while a ring is full, it opens the gate.
        if (yields) return check_unlocked(order);
        check(order());
      },
      py::arg("stream"), py::arg("ahead"), py::arg("yields"));
  module.def(
      "is_idle", [](std::uint64_t stream) { return value_of<std::int32_t>(&cudasched_is_idle, stream) != 0; },
      py::arg("stream"));
  module.def("new_event", [] { return value_of<std::uint64_t>(&cudasched_new_event); });
  module.def(
      "partition_stream",
      [](double fraction) { return value_of<std::uint64_t>(&cudasched_partition_stream, fraction); },
      py::arg("fraction"));
  module.def("unbind_stream", [](std::uint64_t stream) { check(cudasched_unbind_stream(stream)); }, py::arg("stream"));
  module.def("run_directory", [] { return path_by(&cudasched_run_directory); });
  module.def("read_counts", &read_counts, py::arg("path"));
  module.def("counts", [] { return value_of<cudasched_counts>(&cudasched_get_counts); });
  module.def(
      "change",
      [](const std::string& path, std::uint64_t process, const std::string& setting, const std::string& value,
         std::int64_t timeout_ns) {
        std::int32_t outcome = 0;
        check_unlocked([&] {
          return cudasched_change(path.c_str(), process, setting.c_str(), value.c_str(), timeout_ns, &outcome);
        });
        // In the order of enum cudasched_outcome.
        constexpr std::array kOutcomes{"",           "applied",   "unknown", "regions", "policy_hangs",
                                       "withdrawn",  "no_client", "ended",   "busy",    "unclear",
                                       "holds_more", "traced",    "no_trace"};
        return std::string(kOutcomes[static_cast<std::size_t>(outcome) % kOutcomes.size()]);
      },
      py::arg("path"), py::arg("process"), py::arg("setting"), py::arg("value"), py::arg("timeout_ns"));
  module.def("in_flight_ns", [] { return cudasched_in_flight_ns(); });
  module.def("others_slack_ns", [] { return cudasched_others_slack_ns(); });
  module.def(
      "graph_ns", [](std::uintptr_t graph) { return cudasched_graph_ns(reinterpret_cast<void*>(graph)); },
      py::arg("graph"));
}
