// `_core.Graph...`: the face of include/cudasched/graphs.hpp. Handles are integers; python/cudasched/graphs.py gives
// them their shapes.
#include "cudasched/graphs.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"

namespace py = pybind11;

namespace cudasched::bindings {
namespace {

using Handle = std::uint64_t;
using Handles = std::vector<Handle>;
using Sizes = std::array<unsigned, 3>;
// Of no constructor: an object is noted in a table that the GIL guards.
using Unlocked = py::call_guard<py::gil_scoped_release>;

template <class T>
T as(Handle handle) {
  return reinterpret_cast<T>(handle);
}

template <class T>
Handle number(T handle) {
  return reinterpret_cast<Handle>(handle);
}

std::vector<CUgraphNode> nodes(const Handles& handles) {
  std::vector<CUgraphNode> made;
  for (const Handle handle : handles) made.push_back(as<CUgraphNode>(handle));
  return made;
}

// A kernel with its parameters, which live here.
struct OwnedKernel {
  graphs::Kernel kernel;
  std::vector<std::string> parameters;
};

OwnedKernel kernel_of(Handle function, const Sizes& grid, const Sizes& block, unsigned shared_bytes,
                      const std::vector<py::bytes>& parameters) {
  OwnedKernel made;
  made.kernel.function = as<CUfunction>(function);
  for (std::size_t i = 0; i < 3; ++i) {
    made.kernel.grid[i] = grid[i];
    made.kernel.block[i] = block[i];
  }
  made.kernel.shared_bytes = shared_bytes;
  for (const py::bytes& parameter : parameters) made.parameters.emplace_back(parameter);
  for (std::string& parameter : made.parameters) {
    made.kernel.parameters.push_back(parameter.data());
    made.kernel.parameter_bytes.push_back(parameter.size());
  }
  return made;
}

using MadeConditional = std::pair<Handle, Handles>;

MadeConditional told(const graphs::Conditional& conditional) {
  MadeConditional made{number(conditional.node), {}};
  for (CUgraph const body : conditional.bodies) made.second.push_back(number(body));
  return made;
}

void translate_graph_errors(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(std::move(thrown));
  } catch (const graphs::UnsupportedError& error) {
    set_error("UnsupportedError", error.what(), "cudasched.graphs");
  } catch (const graphs::Error& error) {
    set_error("DriverError", error.what(), "cudasched.graphs");
  }
}

using GivenUses = std::vector<std::tuple<std::size_t, std::uint32_t, std::uint32_t>>;

std::vector<graphs::Use> uses_of(const GivenUses& given) {
  std::vector<graphs::Use> made;
  for (const auto& [bytes, first, last] : given) made.push_back({bytes, first, last});
  return made;
}

}  // namespace

void bind_graphs(py::module_& module) {
  using graphs::Builder;
  using graphs::Condition;
  py::register_local_exception_translator(&translate_graph_errors);

  py::class_<Builder>(module, "GraphBuilder")
      .def(py::init([](Handle graph) { return Builder(as<CUgraph>(graph)); }), py::arg("graph"))
      .def_property_readonly("handle", [](const Builder& self) { return number(self.handle()); })
      .def_property_readonly("node_count", &Builder::node_count)
      .def(
          "add_kernel",
          [](Builder& self, Handle function, const Sizes& grid, const Sizes& block, unsigned shared_bytes,
             const std::vector<py::bytes>& parameters, const Handles& after) {
            const OwnedKernel made = kernel_of(function, grid, block, shared_bytes, parameters);
            return number(self.add_kernel(made.kernel, nodes(after)));
          },
          py::arg("function"), py::arg("grid"), py::arg("block"), py::arg("shared_bytes"), py::arg("parameters"),
          py::arg("after"))
      .def(
          "add_copy",
          [](Builder& self, Handle to, Handle from, std::size_t bytes, const Handles& after) {
            return number(self.add_copy(to, from, bytes, nodes(after)));
          },
          py::arg("to"), py::arg("source"), py::arg("nbytes"), py::arg("after"))
      .def(
          "add_fill",
          [](Builder& self, Handle to, std::uint8_t value, std::size_t bytes, const Handles& after) {
            return number(self.add_fill(to, value, bytes, nodes(after)));
          },
          py::arg("to"), py::arg("value"), py::arg("nbytes"), py::arg("after"))
      .def(
          "add_graph",
          [](Builder& self, const Builder& child, const Handles& after) {
            return number(self.add_graph(child, nodes(after)));
          },
          py::arg("child"), py::arg("after"))
      .def(
          "add_empty", [](Builder& self, const Handles& after) { return number(self.add_empty(nodes(after))); },
          py::arg("after"))
      .def(
          "add_if",
          [](Builder& self, Handle condition, bool with_else, const Handles& after) {
            return told(self.add_if(Condition{condition}, with_else, nodes(after)));
          },
          py::arg("condition"), py::arg("with_else"), py::arg("after"))
      .def(
          "add_while",
          [](Builder& self, Handle condition, const Handles& after) {
            return told(self.add_while(Condition{condition}, nodes(after)));
          },
          py::arg("condition"), py::arg("after"))
      .def(
          "add_switch",
          [](Builder& self, Handle condition, unsigned bodies, const Handles& after) {
            return told(self.add_switch(Condition{condition}, bodies, nodes(after)));
          },
          py::arg("condition"), py::arg("bodies"), py::arg("after"));

  py::class_<graphs::Graph, Builder>(module, "Graph")
      .def(py::init<>())
      .def_static("driver_version", &graphs::driver_version)
      .def(
          "condition",
          [](graphs::Graph& self, std::optional<unsigned> start) {
            return (start ? self.condition(*start) : self.condition()).handle;
          },
          py::arg("start"));

  py::class_<graphs::Capture>(module, "GraphCapture")
      .def(py::init([](Handle stream, const Builder* into, const Handles& after) {
             if (into == nullptr) return std::make_unique<graphs::Capture>(as<CUstream>(stream));
             return std::make_unique<graphs::Capture>(as<CUstream>(stream), *into, nodes(after));
           }),
           py::arg("stream"), py::arg("into"), py::arg("after"))
      .def("finish", &graphs::Capture::finish)
      .def("close", &graphs::Capture::close);

  py::class_<graphs::Executable>(module, "GraphExecutable")
      .def(py::init([](const graphs::Graph& graph, bool device_launch) {
             const py::gil_scoped_release released;
             return std::make_unique<graphs::Executable>(graph,
                                                         device_launch ? graphs::For::kDevice : graphs::For::kHost);
           }),
           py::arg("graph"), py::arg("device_launch"))
      .def_property_readonly("handle", &graphs::Executable::device_handle)
      .def(
          "launch", [](const graphs::Executable& self, Handle stream) { self.launch(as<CUstream>(stream)); },
          py::arg("stream"), Unlocked())
      .def(
          "upload", [](const graphs::Executable& self, Handle stream) { self.upload(as<CUstream>(stream)); },
          py::arg("stream"), Unlocked())
      .def(
          "update",
          [](graphs::Executable& self, const graphs::Graph& graph) {
            const graphs::Update made = self.update(graph);
            return std::tuple(made.done, static_cast<int>(made.why), number(made.node));
          },
          py::arg("graph"))
      .def(
          "set_kernel",
          [](graphs::Executable& self, Handle node, Handle function, const Sizes& grid, const Sizes& block,
             unsigned shared_bytes, const std::vector<py::bytes>& parameters) {
            const OwnedKernel made = kernel_of(function, grid, block, shared_bytes, parameters);
            self.set_kernel(as<CUgraphNode>(node), made.kernel);
          },
          py::arg("node"), py::arg("function"), py::arg("grid"), py::arg("block"), py::arg("shared_bytes"),
          py::arg("parameters"))
      .def(
          "set_enabled",
          [](graphs::Executable& self, Handle node, bool enabled) { self.set_enabled(as<CUgraphNode>(node), enabled); },
          py::arg("node"), py::arg("enabled"));

  py::class_<graphs::StaticPool>(module, "GraphPool")
      .def(py::init([](const GivenUses& uses, std::size_t alignment) {
             return std::make_unique<graphs::StaticPool>(uses_of(uses), alignment);
           }),
           py::arg("uses"), py::arg("alignment"))
      .def_property_readonly("nbytes", &graphs::StaticPool::bytes)
      .def(
          "address", [](const graphs::StaticPool& self, std::size_t use) { return Handle{self.address(use)}; },
          py::arg("use"))
      .def_static(
          "plan",
          [](const GivenUses& uses, std::size_t alignment) {
            graphs::Plan plan = graphs::plan_memory(uses_of(uses), alignment);
            return std::pair(std::move(plan.offsets), plan.bytes);
          },
          py::arg("uses"), py::arg("alignment"));

  py::class_<graphs::LinkedModule>(module, "LinkedModule")
      .def(py::init([](const std::vector<py::bytes>& images, const std::string& device_runtime) {
             std::vector<std::string> given;
             for (const py::bytes& image : images) given.emplace_back(image);
             return std::make_unique<graphs::LinkedModule>(given, device_runtime);
           }),
           py::arg("images"), py::arg("device_runtime"))
      .def_property_readonly("handle", [](const graphs::LinkedModule& self) { return number(self.handle()); })
      .def(
          "function",
          [](const graphs::LinkedModule& self, const std::string& name) { return number(self.function(name.c_str())); },
          py::arg("name"))
      .def_static("find_device_runtime", &graphs::find_device_runtime);

  py::class_<graphs::Collectives>(module, "Collectives")
      .def(py::init([](const std::vector<int>& devices) {
             const py::gil_scoped_release released;
             return std::make_unique<graphs::Collectives>(devices);
           }),
           py::arg("devices"))
      .def(
          "sum",
          [](graphs::Collectives& self, const Handles& data, std::size_t count, const Handles& streams) {
            std::vector<CUdeviceptr> arrays(data.begin(), data.end());
            std::vector<CUstream> on;
            for (const Handle stream : streams) on.push_back(as<CUstream>(stream));
            self.sum(arrays, count, on);
          },
          py::arg("data"), py::arg("count"), py::arg("streams"), Unlocked())
      .def_static(
          "enable_peer_access",
          [](Handle from, Handle to) { graphs::enable_peer_access(as<CUcontext>(from), as<CUcontext>(to)); },
          py::arg("context"), py::arg("peer"));
}

}  // namespace cudasched::bindings
