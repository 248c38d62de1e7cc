#include "predict/trees/model.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <sstream>
#include <system_error>

#include "base/hash.hpp"
#include "predict/trees/document.hpp"

namespace cudasched::predict::trees {
namespace {

constexpr std::string_view kObjectives[] = {"reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror",
                                            "reg:quantileerror"};
constexpr double kNoParent = std::numeric_limits<std::int32_t>::max();

// A value and the way to it, for messages: learner.gradient_booster.model.trees[3].left_children
class Field {
 public:
  Field(const Value& value, std::string path) : value_(value), path_(std::move(path)) {}

  [[noreturn]] void fail(const std::string& problem) const {
    throw ModelError((path_.empty() ? "the file" : path_) + ": " + problem);
  }

  const Object& object() const { return as<Object>("an object"); }
  const std::string& text() const { return as<std::string>("a string"); }
  const Number& number() const { return as<Number>("a number"); }

  // An empty array may be one of numbers or not.
  std::span<const Value> array() const {
    if (is_empty_array()) return {};
    return as<Array>("an array");
  }

  std::span<const Number> numbers() const {
    if (is_empty_array()) return {};
    return as<Numbers>("an array of numbers");
  }

  std::optional<Field> find(std::string_view key) const {
    for (const Member& member : object()) {
      if (member.key == key) return Field(member.value, path_.empty() ? member.key : path_ + "." + member.key);
    }
    return std::nullopt;
  }

  Field at(std::string_view key) const {
    std::optional<Field> found = find(key);
    if (!found) fail("'" + std::string(key) + "' is missing");
    return *std::move(found);
  }

  Field item(std::size_t index) const { return {array()[index], path_ + "[" + std::to_string(index) + "]"}; }

  // An unknown field could change the meaning of the others.
  void allow_only(std::initializer_list<std::string_view> keys) const {
    for (const Member& member : object()) {
      if (std::find(keys.begin(), keys.end(), member.key) == keys.end()) {
        fail("'" + member.key.substr(0, 80) + "' is not supported");
      }
    }
  }

  void expect_empty(const char* meaning) const {
    if (!is_empty_array()) fail(std::string(meaning) + " are not supported");
  }

  // Integers that XGBoost writes as strings.
  std::int64_t integer_text(std::int64_t least, std::int64_t most) const {
    std::int64_t read = 0;
    const std::string& from = text();
    const auto [end, error] = std::from_chars(from.data(), from.data() + from.size(), read);
    if (error != std::errc{} || end != from.data() + from.size()) fail("'" + from.substr(0, 40) + "' is no integer");
    if (read < least || read > most) {
      fail(from + " is outside " + std::to_string(least) + " to " + std::to_string(most));
    }
    return read;
  }

  std::int64_t integer(const Number& from, std::int64_t least, std::int64_t most) const {
    if (!(from.value >= static_cast<double>(least) && from.value <= static_cast<double>(most)) ||
        from.value != std::floor(from.value)) {
      fail(plain(from.value) + " is no integer from " + std::to_string(least) + " to " + std::to_string(most));
    }
    return static_cast<std::int64_t>(from.value);
  }

  static std::string plain(double value) {
    std::ostringstream out;
    out << value;
    return out.str();
  }

 private:
  template <typename Kind>
  const Kind& as(const char* wanted) const {
    const auto* found = std::get_if<Kind>(&value_.content);
    if (found == nullptr) fail(std::string("expected ") + wanted);
    return *found;
  }

  bool is_empty_array() const noexcept {
    const auto* items = std::get_if<Array>(&value_.content);
    const auto* numbers = std::get_if<Numbers>(&value_.content);
    return (items != nullptr && items->empty()) || (numbers != nullptr && numbers->empty());
  }

  const Value& value_;
  std::string path_;
};

// "1.5E0", or from 3.1 "[1.5E0]".
float read_base_score(const Field& field) {
  std::string_view text = field.text();
  if (text.starts_with('[') && text.ends_with(']') && text.size() >= 2) text = text.substr(1, text.size() - 2);
  if (text.find(',') != std::string_view::npos) field.fail("several base scores (several targets) are not supported");
  float score = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), score);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(score)) {
    field.fail("'" + field.text().substr(0, 40) + "' is no finite number");
  }
  return score;
}

void check_version(const Field& top) {
  const Field version = top.at("version");
  const std::span<const Number> parts = version.numbers();
  if (parts.size() != 3) version.fail("expected three numbers");
  const double major = parts[0].value;
  const bool is_supported = major == 3 || (major == 2 && parts[1].value >= 1);
  if (!is_supported) {
    version.fail("saved by XGBoost " + Field::plain(major) + "." + Field::plain(parts[1].value) +
                 "; 2.1 to 3.x are supported: load and save it with one of these");
  }
}

std::string read_objective(const Field& objective) {
  const std::string& name = objective.at("name").text();
  if (std::find(std::begin(kObjectives), std::end(kObjectives), name) == std::end(kObjectives)) {
    std::string known;
    for (const std::string_view one : kObjectives) known.append(known.empty() ? "" : ", ").append(one);
    objective.fail("objective '" + name.substr(0, 80) + "' is not supported; these are: " + known);
  }
  if (name == "reg:quantileerror") {
    const Field alpha = objective.at("quantile_loss_param").at("quantile_alpha");
    if (alpha.text().find(',') != std::string::npos) alpha.fail("several quantiles are not supported");
  }
  return name;
}

void check_feature_types(const Field& types, std::size_t features) {
  const std::size_t count = types.array().size();
  if (count != 0 && count != features) types.fail("expected one a feature, or none");
  for (std::size_t i = 0; i < count; ++i) {
    const Field type = types.item(i);
    if (type.text() == "c") type.fail("categorical features are not supported");
    constexpr std::string_view kNumeric[] = {"float", "int", "i", "q"};
    if (std::find(std::begin(kNumeric), std::end(kNumeric), type.text()) == std::end(kNumeric)) {
      type.fail("feature type '" + type.text().substr(0, 40) + "' is not supported");
    }
  }
}

class TreeReader {
 public:
  TreeReader(const Field& tree, std::size_t index, std::uint32_t features) : tree_(tree), features_(features) {
    tree.allow_only({"base_weights", "categories", "categories_nodes", "categories_segments", "categories_sizes",
                     "default_left", "id", "left_children", "loss_changes", "parents", "right_children",
                     "split_conditions", "split_indices", "split_type", "sum_hessian", "tree_param"});
    const Field parameters = tree.at("tree_param");
    parameters.allow_only({"num_deleted", "num_feature", "num_nodes", "size_leaf_vector"});
    const Field leaf_vector = parameters.at("size_leaf_vector");
    if (leaf_vector.integer_text(0, kMaxNodes) > 1) leaf_vector.fail("vector leaves (multi-target) are not supported");
    const Field feature_count = parameters.at("num_feature");
    if (feature_count.integer_text(0, kMaxFeatures) != features) feature_count.fail("differs from the learner's");
    const std::int64_t all = parameters.at("num_nodes").integer_text(1, kMaxNodes);
    count_ = static_cast<std::size_t>(all);
    reachable_ = static_cast<std::size_t>(all - parameters.at("num_deleted").integer_text(0, all - 1));
    const Field id = tree.at("id");
    if (id.number().value != static_cast<double>(index)) id.fail("the trees are not in order");
    for (const char* key : {"categories", "categories_nodes", "categories_segments", "categories_sizes"}) {
      tree.at(key).expect_empty("categorical splits");
    }
    for (const char* key : {"base_weights", "loss_changes"}) column(key);
  }

  std::size_t count() const noexcept { return count_; }

  Tree read() {
    const std::span<const Number> left = column("left_children");
    const std::span<const Number> right = column("right_children");
    const std::span<const Number> parents = column("parents");
    const std::span<const Number> conditions = column("split_conditions");
    const std::span<const Number> indices = column("split_indices");
    const std::span<const Number> types = column("split_type");
    const std::span<const Number> default_left = column("default_left");
    const std::span<const Number> covers = column("sum_hessian");

    Tree tree;
    tree.nodes.reserve(reachable_);
    tree.covers.reserve(reachable_);
    // Breadth first: `order[i]` is where the file has the node that is to be tree.nodes[i].
    struct Place {
      std::size_t at;
      int depth;
    };
    std::vector<Place> order = {{0, 0}};
    std::vector<bool> is_seen(count_, false);
    is_seen[0] = true;
    if (parents[0].value != kNoParent && parents[0].value != -1) fail("parents", 0, "the root has a parent");
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto [at, depth] = order[i];
      tree.depth = std::max(tree.depth, depth);
      Node node;
      node.value = conditions[at].real;
      if (left[at].value == -1) {
        if (right[at].value != -1) fail("right_children", at, "a leaf has a child");
      } else {
        if (types[at].value != 0) fail("split_type", at, "categorical splits are not supported");
        node.feature = static_cast<std::uint32_t>(integer("split_indices", at, indices[at], 0, features_ - 1.0));
        node.default_left = integer("default_left", at, default_left[at], 0, 1) == 1;
        node.left = static_cast<std::int32_t>(order.size());
        node.right = node.left + 1;
        for (const auto& [key, children] : {std::pair{"left_children", left}, std::pair{"right_children", right}}) {
          const auto child =
              static_cast<std::size_t>(integer(key, at, children[at], 1, static_cast<double>(count_) - 1));
          if (is_seen[child]) fail(key, at, "node " + std::to_string(child) + " is reached twice: no tree");
          is_seen[child] = true;
          if (parents[child].value != static_cast<double>(at))
            fail("parents", child, "differs from its parent's child");
          order.push_back({child, depth + 1});
        }
      }
      tree.nodes.push_back(node);
      tree.covers.push_back(covers[at].real);
    }
    if (tree.nodes.size() != reachable_) {
      tree_.fail(std::to_string(tree.nodes.size()) + " nodes are reached from the root, " + std::to_string(reachable_) +
                 " should be by num_nodes and num_deleted");
    }
    return tree;
  }

 private:
  std::span<const Number> column(const char* key) const {
    const Field field = tree_.at(key);
    const std::span<const Number> values = field.numbers();
    if (values.size() != count_) {
      field.fail(std::to_string(values.size()) + " values for " + std::to_string(count_) + " nodes");
    }
    for (std::size_t node = 0; node < count_; ++node) {
      if (!std::isfinite(values[node].real)) fail(key, node, "a number that is not finite");
    }
    return values;
  }

  [[noreturn]] void fail(const char* key, std::size_t node, const std::string& problem) const {
    tree_.at(key).fail("node " + std::to_string(node) + ": " + problem);
  }

  std::int64_t integer(const char* key, std::size_t node, const Number& from, double least, double most) const {
    if (!(from.value >= least && from.value <= most) || from.value != std::floor(from.value)) {
      fail(key, node,
           Field::plain(from.value) + " is no integer from " + Field::plain(least) + " to " + Field::plain(most));
    }
    return static_cast<std::int64_t>(from.value);
  }

  const Field& tree_;
  std::uint32_t features_;
  std::size_t count_ = 0;
  std::size_t reachable_ = 0;
};

void read_trees(const Field& booster, Model& model) {
  const std::string& name = booster.at("name").text();
  if (name != "gbtree") booster.fail("booster '" + name.substr(0, 80) + "' is not supported; gbtree is");
  booster.allow_only({"model", "name"});
  const Field forest = booster.at("model");
  // Dropped trees' weights, of which 3.3 made fields of a gbtree.
  if (forest.find("weight_drop")) forest.fail("booster 'dart' is not supported; gbtree is");
  forest.allow_only({"cats", "gbtree_model_param", "iteration_indptr", "tree_info", "trees"});
  if (const std::optional<Field> categories = forest.find("cats")) {
    categories->allow_only({"enc", "feature_segments", "sorted_idx"});
    for (const char* key : {"enc", "feature_segments", "sorted_idx"}) {
      categories->at(key).expect_empty("categorical features");
    }
  }
  const Field parameters = forest.at("gbtree_model_param");
  parameters.allow_only({"num_parallel_tree", "num_trees"});
  const auto count = static_cast<std::size_t>(parameters.at("num_trees").integer_text(0, kMaxTrees));

  const Field trees = forest.at("trees");
  if (trees.array().size() != count) trees.fail("num_trees is " + std::to_string(count));
  const Field groups = forest.at("tree_info");
  if (groups.numbers().size() != count) groups.fail("num_trees is " + std::to_string(count));
  for (const Number& group : groups.numbers()) {
    if (group.value != 0) groups.fail("several classes or targets are not supported");
  }
  const Field iterations = forest.at("iteration_indptr");
  double last = 0;
  for (const Number& start : iterations.numbers()) {
    if (!(start.value >= last)) iterations.fail("does not ascend");
    last = start.value;
  }
  if (last != static_cast<double>(count)) iterations.fail("does not end at num_trees, " + std::to_string(count));

  std::size_t nodes = 0;
  model.trees.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const Field tree = trees.item(i);
    TreeReader reader(tree, i, model.features);
    nodes += reader.count();
    if (nodes > kMaxNodes) tree.fail("the trees have more than " + std::to_string(kMaxNodes) + " nodes");
    model.trees.push_back(reader.read());
  }
}

Model read_model(const Field& top) {
  if (top.find("Config")) top.fail("a pickled booster's state is not supported; use Booster.save_model");
  top.allow_only({"learner", "version"});
  check_version(top);
  const Field learner = top.at("learner");
  learner.allow_only(
      {"attributes", "feature_names", "feature_types", "gradient_booster", "learner_model_param", "objective"});
  Model model;
  model.objective = read_objective(learner.at("objective"));

  const Field parameters = learner.at("learner_model_param");
  parameters.allow_only({"base_score", "boost_from_average", "num_class", "num_feature", "num_target"});
  if (parameters.at("num_class").integer_text(0, kMaxNodes) > 1) {
    parameters.at("num_class").fail("several classes are not supported");
  }
  if (parameters.at("num_target").integer_text(0, kMaxNodes) > 1) {
    parameters.at("num_target").fail("several targets are not supported");
  }
  model.features = static_cast<std::uint32_t>(parameters.at("num_feature").integer_text(1, kMaxFeatures));
  model.base_score = read_base_score(parameters.at("base_score"));

  if (const std::optional<Field> names = learner.find("feature_names")) {
    const std::size_t count = names->array().size();
    if (count != 0 && count != model.features) names->fail("expected one a feature, or none");
    for (std::size_t i = 0; i < count; ++i) model.feature_names.push_back(names->item(i).text());
  }
  if (const std::optional<Field> attributes = learner.find("attributes")) {
    if (const auto architecture = attributes->find("cudasched_architecture")) model.architecture = architecture->text();
    if (const auto gpu = attributes->find("cudasched_gpu")) model.gpu = gpu->text();
  }
  if (const std::optional<Field> types = learner.find("feature_types")) check_feature_types(*types, model.features);
  read_trees(learner.at("gradient_booster"), model);
  return model;
}

void append_floats(const Field& bits, std::vector<float>& out) {
  for (const Number& number : bits.numbers()) {
    out.push_back(std::bit_cast<float>(
        static_cast<std::uint32_t>(bits.integer(number, 0, std::numeric_limits<std::uint32_t>::max()))));
  }
}

SavedModel read_saved(const Field& top) {
  SavedModel saved;
  const std::optional<Field> own = top.find("cudasched");
  if (!own) {
    saved.model = read_model(top);
    return saved;
  }
  top.allow_only({"cudasched", "margins", "model", "rows"});
  if (own->number().value != 1) own->fail("version " + Field::plain(own->number().value) + "; 1 is supported");
  saved.model = read_model(top.at("model"));
  const Field rows = top.at("rows");
  const std::size_t count = rows.array().size();
  for (std::size_t i = 0; i < count; ++i) {
    const Field row = rows.item(i);
    if (row.numbers().size() != saved.model.features) row.fail("expected a value a feature");
    append_floats(row, saved.rows);
  }
  const Field margins = top.at("margins");
  append_floats(margins, saved.margins);
  if (saved.margins.size() != count) margins.fail("expected one a row");
  return saved;
}

}  // namespace

std::uint64_t identity_of(const Model& model) noexcept {
  std::uint64_t hash = mix(model.features, std::bit_cast<std::uint32_t>(model.base_score));
  for (const Tree& tree : model.trees) {
    hash = mix(hash, tree.nodes.size());
    for (const Node& node : tree.nodes) {
      hash = mix(hash, std::uint64_t{node.feature} << 32 | std::bit_cast<std::uint32_t>(node.value));
      hash = mix(hash, std::uint64_t{static_cast<std::uint32_t>(node.left)} << 1 | (node.default_left ? 1 : 0));
    }
  }
  return hash == 0 ? 1 : hash;
}

int Model::depth() const noexcept {
  int deepest = 0;
  for (const Tree& tree : trees) deepest = std::max(deepest, tree.depth);
  return deepest;
}

SavedModel import_model(std::string_view bytes, const std::string& name) {
  try {
    const Value document = read_document(bytes);
    return read_saved(Field(document, ""));
  } catch (const ModelError& error) {
    throw ModelError(name + ": " + error.what());
  }
}

SavedModel import_model_file(const std::string& path) {
  std::error_code error;
  std::ifstream file;
  if (std::filesystem::is_regular_file(path, error)) file.open(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file.is_open() ? static_cast<std::streamoff>(file.tellg()) : -1;
  if (size < 0) throw ModelError(path + ": cannot be read; check that it exists and is a file");
  if (static_cast<std::uint64_t>(size) > kMaxDocumentBytes) {
    throw ModelError(path + ": " + std::to_string(size) + " bytes are more than the " +
                     std::to_string(kMaxDocumentBytes) + " that are read");
  }
  std::string bytes(static_cast<std::size_t>(size), '\0');
  file.seekg(0);
  if (!file.read(bytes.data(), size)) throw ModelError(path + ": cannot be read to its end");
  return import_model(bytes, path);
}

}  // namespace cudasched::predict::trees
