// `_core.Trees`: a saved model, its walks over batches of rows, and the contributions of its features.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.hpp"
#include "bindings/bindings.hpp"
#include "predict/trees/evaluator.hpp"
#include "predict/trees/explain.hpp"

namespace py = pybind11;

namespace cudasched::bindings {
namespace {

using predict::trees::Evaluator;
using predict::trees::Explainer;
using predict::trees::Isa;
using predict::trees::SavedModel;

using Rows = py::array_t<float, py::array::c_style>;

Isa isa_of(const std::string& name) {
  std::string known;
  for (const Isa isa : predict::trees::kIsas) {
    if (name == name_of(isa)) return isa;
    known.append(known.empty() ? "" : ", ").append(name_of(isa));
  }
  throw ModelError("isa '" + name + "' is unknown; there are " + known);
}

class Trees {
 public:
  Trees(const SavedModel& saved, const std::string& name, const std::optional<std::string>& isa)
      : model_(saved.model), evaluator_(isa ? make_evaluator(model_, isa_of(*isa)) : make_evaluator(model_)) {
    replay(*evaluator_, saved, name);
  }

  const predict::trees::Model& model() const noexcept { return model_; }
  const char* isa() const noexcept { return name_of(evaluator_->isa()); }

  std::vector<std::string> isas() const {
    std::vector<std::string> found;
    for (const Isa isa : predict::trees::kIsas) {
      if (can_walk(model_, isa)) found.emplace_back(name_of(isa));
    }
    return found;
  }

  std::vector<py::str> feature_names() const {
    std::vector<py::str> names;
    for (const std::string& name : model_.feature_names) names.push_back(text_of(name));
    return names;
  }

  py::array_t<float> margins(const Rows& rows) const {
    const auto count = checked_count(rows);
    py::array_t<float> out(static_cast<py::ssize_t>(count));
    const float* from = rows.data();
    float* to = out.mutable_data();
    const py::gil_scoped_release released;
    evaluator_->margins(from, count, to);
    return out;
  }

  // A value a node in each column, tree after tree; children come after their parent, and count within their tree.
  py::dict nodes() const {
    py::dict columns;
    const auto put = [&](const char* name, auto value) {
      std::vector<decltype(value(std::size_t{}, std::size_t{}))> values;
      for (std::size_t tree = 0; tree < model_.trees.size(); ++tree) {
        for (std::size_t at = 0; at < model_.trees[tree].nodes.size(); ++at) values.push_back(value(tree, at));
      }
      columns[name] = py::array(static_cast<py::ssize_t>(values.size()), values.data());
    };
    const auto node = [&](auto tree, auto at) -> const auto& { return model_.trees[tree].nodes[at]; };
    const auto covers = [&](auto tree) -> const auto& { return model_.trees[tree].covers; };
    put("tree", [](auto tree, auto) { return static_cast<std::uint32_t>(tree); });
    put("left", [&](auto tree, auto at) { return node(tree, at).left; });
    put("right", [&](auto tree, auto at) { return node(tree, at).right; });
    put("feature", [&](auto tree, auto at) { return std::uint32_t{node(tree, at).feature}; });
    put("value", [&](auto tree, auto at) { return node(tree, at).value; });
    put("cover", [&](auto tree, auto at) { return covers(tree).empty() ? 0.0F : covers(tree)[at]; });
    put("default_left", [&](auto tree, auto at) { return std::uint8_t{node(tree, at).default_left}; });
    return columns;
  }

  py::array_t<double> contributions(const Rows& rows) {
    const auto count = checked_count(rows);
    const std::size_t features = model_.features;
    py::array_t<double> out({static_cast<py::ssize_t>(count), static_cast<py::ssize_t>(features + 1)});
    const float* from = rows.data();
    double* to = out.mutable_data();
    const py::gil_scoped_release released;
    std::call_once(explained_, [this] { explainer_.emplace(model_); });
    for (std::size_t i = 0; i < count; ++i) explainer_->contributions(from + i * features, to + i * (features + 1));
    return out;
  }

 private:
  std::size_t checked_count(const Rows& rows) const {
    if (rows.ndim() == 2 && rows.shape(1) == static_cast<py::ssize_t>(model_.features)) {
      return static_cast<std::size_t>(rows.shape(0));
    }
    std::string shape;
    for (py::ssize_t i = 0; i < rows.ndim(); ++i) shape.append(i ? ", " : "").append(std::to_string(rows.shape(i)));
    throw ModelError("rows have the shape (" + shape + "); the model takes (n, " + std::to_string(model_.features) +
                     ")");
  }

  predict::trees::Model model_;
  std::unique_ptr<const Evaluator> evaluator_;
  std::once_flag explained_;
  std::optional<Explainer> explainer_;  // made when it is first asked for
};

std::unique_ptr<Trees> open(const std::variant<py::bytes, std::filesystem::path>& source,
                            const std::optional<std::string>& isa) {
  if (const auto* path = std::get_if<std::filesystem::path>(&source)) {
    const py::gil_scoped_release released;
    return std::make_unique<Trees>(predict::trees::import_model_file(*path), *path, isa);
  }
  const std::string_view bytes = std::get<py::bytes>(source);
  const py::gil_scoped_release released;
  return std::make_unique<Trees>(predict::trees::import_model(bytes, "the model"), "the model", isa);
}

}  // namespace

void bind_trees(py::module_& module) {
  py::class_<Trees>(module, "Trees")
      .def(py::init(&open), py::arg("source"), py::arg("isa") = py::none())
      .def_property_readonly("features", [](const Trees& self) { return self.model().features; })
      .def_property_readonly("feature_names", &Trees::feature_names)
      .def_property_readonly("architecture", [](const Trees& self) { return text_of(self.model().architecture); })
      .def_property_readonly("gpu", [](const Trees& self) { return text_of(self.model().gpu); })
      .def_property_readonly("trees", [](const Trees& self) { return self.model().trees.size(); })
      .def_property_readonly("depth", [](const Trees& self) { return self.model().depth(); })
      .def_property_readonly("objective", [](const Trees& self) { return self.model().objective; })
      .def_property_readonly("base_score", [](const Trees& self) { return self.model().base_score; })
      .def_property_readonly("isa", &Trees::isa)
      .def("isas", &Trees::isas)
      .def("nodes", &Trees::nodes)
      .def("margins", &Trees::margins, py::arg("rows").noconvert())
      .def("contributions", &Trees::contributions, py::arg("rows").noconvert());
}

}  // namespace cudasched::bindings
