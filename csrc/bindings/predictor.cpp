// `_core.launch_features` and `_core.Replay`: the trees' features of recorded launches, and the predictor's answers to
// recorded launches. Both take a recording's columns as a dict of numpy arrays:
//   grid_x .. cluster_z, dynamic_shared_bytes, static_shared_bytes, local_bytes, registers, max_threads,
//   blocks_per_sm, parameter_bytes: one number a launch
//   function, functions: index into a list of mangled names; -1 for graphs
//   identity: optional; without it, it is made of the name and the attributes
//   words, word_offsets: all blocks one after the other; where each begins, and the end of the last
//   pointers, pointer_offsets: alike, which words of a block were pointers; optional
// and Replay also
//   duration_ns (0 or less: not timed), and, if there are such: overlapped, busy, graph (a number a graph);
//   elapsed_ns: the time between two events around the launch; the predictor then learns from it, as at run time
//   submitted_ns, completed_ns: a launch is learned from when it has completed; without them, before the next launch.
#include "predict/predictor.hpp"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "bindings/bindings.hpp"
#include "predict/features.hpp"
#include "predict/outlook.hpp"
#include "predict/trees/evaluator.hpp"

namespace py = pybind11;

namespace cudasched::bindings {
namespace {

using predict::kFeatureCount;

template <typename T>
class Column {
 public:
  using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

  Column(const py::dict& columns, const char* name) : name_(name) {
    if (!columns.contains(name)) throw Error(std::string("the recording has no column ") + name);
    array_ = Array::ensure(columns[name]);
    if (!array_ || array_.ndim() != 1) {
      PyErr_Clear();
      throw Error(std::string("column ") + name + " is no one-dimensional array of numbers");
    }
    values_ = {array_.data(), static_cast<std::size_t>(array_.size())};
  }

  void expect(std::size_t rows) const {
    if (values_.size() != rows) {
      throw Error(std::string("column ") + name_ + " has " + std::to_string(values_.size()) + " values for " +
                  std::to_string(rows) + " launches");
    }
  }

  std::span<const T> values() const noexcept { return values_; }
  T operator[](std::size_t row) const noexcept { return values_[row]; }

 private:
  const char* name_;
  Array array_;
  std::span<const T> values_;
};

template <typename T>
std::optional<Column<T>> optional_column(const py::dict& columns, const char* name, std::size_t rows) {
  if (!columns.contains(name)) return std::nullopt;
  Column<T> column(columns, name);
  column.expect(rows);
  return column;
}

// A list a launch.
template <typename T>
class Lists {
 public:
  Lists(const py::dict& columns, const char* name, const char* offsets_name, std::size_t rows)
      : values_(columns, name), offsets_(columns, offsets_name) {
    offsets_.expect(rows + 1);
    std::int64_t last = 0;
    for (const std::int64_t offset : offsets_.values()) {
      if (offset < last) throw Error(std::string("column ") + offsets_name + " does not rise from 0");
      last = offset;
    }
    if (last > static_cast<std::int64_t>(values_.values().size())) {
      throw Error(std::string("column ") + offsets_name + " goes beyond the end of " + name);
    }
  }

  std::span<const T> operator[](std::size_t row) const noexcept {
    const auto begin = static_cast<std::size_t>(offsets_[row]);
    return values_.values().subspan(begin, static_cast<std::size_t>(offsets_[row + 1]) - begin);
  }

 private:
  Column<T> values_;
  Column<std::int64_t> offsets_;
};

class Launches {
 public:
  // An address that counts as a pointer wherever the recording says that there was one.
  static constexpr std::uint64_t kPointer = std::uint64_t{0x7f00} << 32;

  Launches(const py::dict& columns, int sm_count, int max_threads_per_sm)
      : function_(columns, "function"),
        rows_(function_.values().size()),
        words_(columns, "words", "word_offsets", rows_),
        sm_count_(sm_count),
        max_threads_per_sm_(max_threads_per_sm) {
    if (sm_count < 1 || max_threads_per_sm < 1) {
      throw Error("a GPU has at least one multiprocessor, and one thread on it");
    }
    for (const char* const name : kNumbers) {
      numbers_.emplace_back(columns, name);
      numbers_.back().expect(rows_);
    }
    if (columns.contains("pointers")) pointers_.emplace(columns, "pointers", "pointer_offsets", rows_);
    identity_ = optional_column<std::uint64_t>(columns, "identity", rows_);
    if (!columns.contains("functions")) throw Error("the recording has no list of functions");
    names_ = columns["functions"].cast<std::vector<std::string>>();
    for (const std::string& name : names_) traits_.push_back(predict::traits_of(name));
    for (const std::int32_t function : function_.values()) {
      if (function >= static_cast<std::int64_t>(names_.size())) {
        throw Error("column function has " + std::to_string(function) + " where there are " +
                    std::to_string(names_.size()) + " functions");
      }
    }
  }

  std::size_t rows() const noexcept { return rows_; }
  bool is_graph(std::size_t row) const noexcept { return function_[row] < 0; }

  predict::Launch launch(std::size_t row) const noexcept {
    predict::Launch launch;
    for (std::size_t axis = 0; axis < 3; ++axis) {
      launch.grid[axis] = numbers_[axis][row];
      launch.block[axis] = numbers_[3 + axis][row];
      launch.cluster[axis] = numbers_[6 + axis][row];
    }
    launch.dynamic_shared_bytes = numbers_[9][row];
    launch.is_graph = is_graph(row);
    return launch;
  }

  // Without an index.
  predict::Function function(std::size_t row) const noexcept {
    predict::Function function;
    function.static_shared_bytes = numbers_[10][row];
    function.local_bytes = numbers_[11][row];
    function.registers = numbers_[12][row];
    function.max_threads = numbers_[13][row];
    function.parameter_bytes = numbers_[15][row];
    const auto name = static_cast<std::size_t>(function_[row]);
    function.traits = traits_[name];
    function.identity = identity_ ? (*identity_)[row] : predict::identity_of(names_[name], function);
    return function;
  }

  predict::Residency residency(std::size_t row) const noexcept {
    return {static_cast<int>(numbers_[14][row]), sm_count_, max_threads_per_sm_};
  }

  // `room` is overwritten where pointers are put back in.
  std::span<const std::uint32_t> words(std::size_t row, std::vector<std::uint32_t>& room) const {
    const std::span<const std::uint32_t> recorded = words_[row];
    if (!pointers_ || (*pointers_)[row].empty()) return recorded;
    room.assign(recorded.begin(), recorded.end());
    for (const std::uint16_t word : (*pointers_)[row]) {
      if (word < room.size()) room[word] = word % 2 == 0 ? 0 : static_cast<std::uint32_t>(kPointer >> 32);
    }
    return room;
  }

  // visit(row, query) for each launch, with its words as they were recorded.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (std::size_t row = 0; row < rows_; ++row) {
      const predict::Launch of_row = launch(row);
      const predict::Function of_kernel = is_graph(row) ? predict::Function{} : function(row);
      visit(row, predict::Query{of_row, &of_kernel, words_[row], residency(row)});
    }
  }

 private:
  static constexpr const char* kNumbers[] = {"grid_x",
                                             "grid_y",
                                             "grid_z",
                                             "block_x",
                                             "block_y",
                                             "block_z",
                                             "cluster_x",
                                             "cluster_y",
                                             "cluster_z",
                                             "dynamic_shared_bytes",
                                             "static_shared_bytes",
                                             "local_bytes",
                                             "registers",
                                             "max_threads",
                                             "blocks_per_sm",
                                             "parameter_bytes"};

  Column<std::int32_t> function_;
  std::size_t rows_;
  Lists<std::uint32_t> words_;
  std::optional<Lists<std::uint16_t>> pointers_;
  std::vector<Column<std::uint32_t>> numbers_;
  std::optional<Column<std::uint64_t>> identity_;
  std::vector<std::string> names_;
  std::vector<predict::NameTraits> traits_;
  int sm_count_;
  int max_threads_per_sm_;
};

// Room for one value a row under `name` of the result, which holds it.
template <typename T>
T* new_column(py::dict& result, const char* name, std::size_t rows) {
  py::array_t<T> array(static_cast<py::ssize_t>(rows));
  result[name] = array;
  return array.mutable_data();
}

py::array_t<float> launch_features(const py::dict& columns, int sm_count, int max_threads_per_sm) {
  const Launches launches(columns, sm_count, max_threads_per_sm);
  py::array_t<float> out({static_cast<py::ssize_t>(launches.rows()), static_cast<py::ssize_t>(kFeatureCount)});
  float* const rows = out.mutable_data();
  const py::gil_scoped_release released;
  // The recording's pointers are zeros already; nothing that is left is one.
  const predict::Allocations none;
  launches.for_each([&](std::size_t row, const predict::Query& query) {
    predict::features(query, &none, rows + row * kFeatureCount);
  });
  return out;
}

// Each launch's outlook on the GPU, by the given times; graphs have zeros.
py::dict launch_outlooks(const py::dict& columns, const py::array_t<double, py::array::c_style>& durations_ns,
                         int sm_count, int max_threads_per_sm) {
  const Launches launches(columns, sm_count, max_threads_per_sm);
  if (durations_ns.ndim() != 1 || static_cast<std::size_t>(durations_ns.size()) != launches.rows()) {
    throw Error("a duration a launch is needed");
  }
  static constexpr std::pair<const char*, float predict::Outlook::*> kValues[] = {
      {"occupancy", &predict::Outlook::occupancy},           {"waves", &predict::Outlook::waves},
      {"sm_utilisation", &predict::Outlook::sm_utilisation}, {"block_efficiency", &predict::Outlook::block_efficiency},
      {"bytes_per_s", &predict::Outlook::bytes_per_s},       {"flops_per_s", &predict::Outlook::flops_per_s}};
  py::dict result;
  auto* const level_of_row = new_column<std::uint8_t>(result, "level", launches.rows());
  std::vector<float*> to;
  for (const auto& value : kValues) to.push_back(new_column<float>(result, value.first, launches.rows()));
  {
    const double* const durations = durations_ns.data();
    const py::gil_scoped_release released;
    launches.for_each([&](std::size_t row, const predict::Query& query) {
      // Whatever is no time, NaN too, is none.
      const double duration = durations[row] >= 1 && durations[row] < 1e18 ? durations[row] : 0;
      const predict::Outlook outlook = predict::outlook_of(query, static_cast<std::int64_t>(duration));
      for (std::size_t i = 0; i < std::size(kValues); ++i) to[i][row] = outlook.*kValues[i].second;
      level_of_row[row] = static_cast<std::uint8_t>(predict::level_of(query, static_cast<std::int64_t>(duration)));
    });
  }
  return result;
}

// A predictor that recorded launches are shown to in their order, as on line: it learns from a launch's duration only
// if it asked for it, and before the next launch.
class Replay {
 public:
  Replay(const std::string& model, float coverage)
      : trees_(model.empty() ? nullptr : predict::trees::load_evaluator(model)),
        predictor_(std::make_unique<predict::Predictor>(coverage)) {
    if (!(coverage > 0 && coverage < 1)) throw ConfigError("coverage is a share between 0 and 1, such as 0.9");
    if (trees_ != nullptr) {
      const std::string apart = predict::features_apart(trees_->feature_names(), trees_->features());
      if (!apart.empty()) {
        throw ModelError("the model was trained on other features than this cudasched makes of launches: " + apart +
                         "; train it anew (cudasched train)");
      }
    }
    allocations_.add(Launches::kPointer, 1);
    predictor_->use_trees(trees_.get());
    predictor_->use_allocations(&allocations_);
  }

  py::dict run(const py::dict& columns, int sm_count, int max_threads_per_sm) {
    const Launches launches(columns, sm_count, max_threads_per_sm);
    const std::size_t rows = launches.rows();
    const Column<std::int64_t> duration(columns, "duration_ns");
    duration.expect(rows);
    const auto overlapped = optional_column<bool>(columns, "overlapped", rows);
    const auto busy = optional_column<bool>(columns, "busy", rows);
    const auto graph = optional_column<std::uint32_t>(columns, "graph", rows);
    const auto elapsed = optional_column<std::int64_t>(columns, "elapsed_ns", rows);
    const auto call = optional_column<std::int64_t>(columns, "call_ns", rows);
    const auto submitted = optional_column<std::int64_t>(columns, "submitted_ns", rows);
    const auto completed = optional_column<std::int64_t>(columns, "completed_ns", rows);
    if (submitted.has_value() != completed.has_value()) {
      throw Error("the recording has one of the columns submitted_ns and completed_ns: both are needed, or neither");
    }

    py::dict result;
    auto* const predicted = new_column<std::int64_t>(result, "predicted_ns", rows);
    auto* const bounds = new_column<std::int64_t>(result, "bound_ns", rows);
    auto* const bases = new_column<std::int64_t>(result, "base_ns", rows);
    auto* const keys = new_column<std::uint64_t>(result, "key", rows);
    auto* const hits = new_column<bool>(result, "hit", rows);
    auto* const cold = new_column<bool>(result, "cold", rows);
    auto* const sampled = new_column<bool>(result, "sampled", rows);
    {
      const py::gil_scoped_release released;
      std::vector<std::uint32_t> room;
      struct Pending {
        std::size_t row;
        predict::Prediction prediction;
      };
      std::deque<Pending> pending;
      const auto learn = [&](const Pending& done) {
        const bool beside = overlapped && (*overlapped)[done.row];
        if (elapsed) {
          predictor_->observe_elapsed(done.prediction, {(*elapsed)[done.row], call ? (*call)[done.row] : 0}, beside);
        } else {
          predictor_->observe(done.prediction, duration[done.row], beside);
        }
      };
      for (std::size_t row = 0; row < rows; ++row) {
        if (completed) {
          // Launches of other streams may complete out of order.
          for (auto next = pending.begin(); next != pending.end();) {
            if ((*completed)[next->row] <= (*submitted)[row]) {
              learn(*next);
              next = pending.erase(next);
            } else {
              ++next;
            }
          }
        }
        const bool is_busy = busy && (*busy)[row];
        const predict::Prediction prediction =
            launches.is_graph(row)
                ? predictor_->predict_graph(reinterpret_cast<const void*>(std::uintptr_t{graph ? (*graph)[row] : 0}), 0,
                                            is_busy)
                : predict(launches, row, is_busy, room);
        predicted[row] = prediction.duration_ns;
        bounds[row] = prediction.bound_ns;
        bases[row] = prediction.base_ns;
        keys[row] = prediction.key;
        hits[row] = prediction.hit;
        cold[row] = prediction.is_whole && prediction.knowledge == predict::Knowledge::kNew;
        sampled[row] = prediction.wants_sample && duration[row] > 0;
        if (!sampled[row]) continue;
        pending.push_back({row, prediction});
        if (!completed) {
          learn(pending.back());
          pending.clear();
        }
      }
      for (const Pending& rest : pending) learn(rest);
    }
    return result;
  }

  py::bytes save() const {
    const std::vector<std::byte> state = predictor_->save();
    return {reinterpret_cast<const char*>(state.data()), state.size()};
  }

  void restore(const py::bytes& state) {
    const std::string_view bytes = state;
    predictor_->restore(std::as_bytes(std::span(bytes)));
  }

 private:
  predict::Prediction predict(const Launches& launches, std::size_t row, bool busy, std::vector<std::uint32_t>& room) {
    predict::Function function = launches.function(row);
    function.index = indices_.try_emplace(function.identity, static_cast<std::uint32_t>(indices_.size())).first->second;
    const predict::Launch launch = launches.launch(row);
    return predictor_->predict({launch, &function, launches.words(row, room), launches.residency(row), busy});
  }

  std::unique_ptr<const predict::trees::Evaluator> trees_;
  predict::Allocations allocations_;
  std::unique_ptr<predict::Predictor> predictor_;
  std::map<std::uint64_t, std::uint32_t> indices_;
};

}  // namespace

void bind_predictor(py::module_& module) {
  module.def("demangled", [](const std::string& name) { return text_of(predict::demangled(name)); }, py::arg("name"));
  module.def("feature_names",
             [] { return std::vector<std::string>(predict::kFeatureNames.begin(), predict::kFeatureNames.end()); });
  module.def("launch_features", &launch_features, py::arg("columns"), py::arg("sm_count"),
             py::arg("max_threads_per_sm") = 2048);
  module.def("launch_outlooks", &launch_outlooks, py::arg("columns"), py::arg("durations_ns"), py::arg("sm_count"),
             py::arg("max_threads_per_sm") = 2048);
  py::class_<Replay>(module, "Replay")
      .def(py::init<const std::string&, float>(), py::arg("model") = "", py::arg("coverage") = 0.9F)
      .def("run", &Replay::run, py::arg("columns"), py::arg("sm_count"), py::arg("max_threads_per_sm") = 2048)
      .def("save", &Replay::save)
      .def("restore", &Replay::restore, py::arg("state"));
}

}  // namespace cudasched::bindings
