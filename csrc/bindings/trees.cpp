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
    std::vector<std::uint32_t> tree;
    std::vector<std::int32_t> left;
    std::vector<std::int32_t> right;
    std::vector<std::uint32_t> feature;
    std::vector<float> value;
    std::vector<float> cover;
    std::vector<std::uint8_t> default_left;
    for (std::size_t i = 0; i < model_.trees.size(); ++i) {
      const predict::trees::Tree& one = model_.trees[i];
      for (std::size_t at = 0; at < one.nodes.size(); ++at) {
        const predict::trees::Node& node = one.nodes[at];
        tree.push_back(static_cast<std::uint32_t>(i));
        left.push_back(node.left);
        right.push_back(node.right);
        feature.push_back(node.feature);
        value.push_back(node.value);
        cover.push_back(one.covers.empty() ? 0.0F : one.covers[at]);
        default_left.push_back(node.default_left ? 1 : 0);
      }
    }
    py::dict columns;
    const auto put = [&columns](const char* name, const auto& values) {
      using Item = typename std::decay_t<decltype(values)>::value_type;
      columns[name] = py::array_t<Item>(static_cast<py::ssize_t>(values.size()), values.data());
    };
    put("tree", tree);
    put("left", left);
    put("right", right);
    put("feature", feature);
    put("value", value);
    put("cover", cover);
    put("default_left", default_left);
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
