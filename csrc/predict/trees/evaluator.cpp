#include "predict/trees/evaluator.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "base/error.hpp"
#include "predict/trees/layout.hpp"
#include "predict/trees/walks.hpp"

namespace cudasched::predict::trees {
namespace {

class NodeWalk final : public Evaluator {
 public:
  explicit NodeWalk(const Model& model) : Evaluator(model, Isa::kNodes), base_score_(model.base_score) {
    for (const Tree& tree : model.trees) {
      const auto first = static_cast<std::int32_t>(nodes_.size());
      roots_.push_back(first);
      for (Node node : tree.nodes) {
        if (!node.is_leaf()) {
          node.left += first;
          node.right += first;
        }
        nodes_.push_back(node);
      }
    }
  }

  float margin(const float* row) const noexcept override {
    float sum = base_score_;
    for (const std::int32_t root : roots_) {
      const Node* node = &nodes_[static_cast<std::size_t>(root)];
      while (!node->is_leaf()) {
        const float value = row[node->feature];
        const bool is_left = std::isnan(value) ? node->default_left : value < node->value;
        node = &nodes_[static_cast<std::size_t>(is_left ? node->left : node->right)];
      }
      sum += node->value;
    }
    return sum;
  }

 private:
  float base_score_;
  std::vector<Node> nodes_;
  std::vector<std::int32_t> roots_;
};

template <int kDepth>
class PortableWalk final : public Evaluator {
 public:
  explicit PortableWalk(const Model& model) : Evaluator(model, Isa::kPortable), heaps_(model) {}

  float margin(const float* row) const noexcept override {
    std::uint32_t keys[KeyHeaps::kMaxSlots];
    for (std::size_t slot = 0; slot < heaps_.slots.size(); ++slot) {
      const auto [feature, missing_left] = heaps_.slots[slot];
      const std::uint32_t missing = missing_left ? 0 : ~std::uint32_t{0};
      keys[slot] = std::isnan(row[feature]) ? missing : order_key(row[feature]);
    }
    constexpr std::size_t kGroup = KeyHeaps::kGroup;
    constexpr std::size_t kPlaces = std::size_t{1} << kDepth;
    const std::uint32_t* below = heaps_.below.data();
    const std::uint8_t* slot = heaps_.slot.data();
    const float* leaves = heaps_.leaves.data();
    float sum = heaps_.base_score;
    for (std::size_t first = 0; first < heaps_.trees; first += kGroup) {
      std::size_t at[kGroup];
      std::fill_n(at, kGroup, 1);
#pragma GCC unroll 8
      for (int level = 0; level < kDepth; ++level) {
#pragma GCC unroll 8
        for (std::size_t tree = 0; tree < kGroup; ++tree) {
          const std::size_t place = tree * kPlaces + at[tree];
          at[tree] += at[tree] + static_cast<std::size_t>(below[place] < keys[slot[place]]);
        }
      }
      const std::size_t count = std::min(kGroup, heaps_.trees - first);
      for (std::size_t tree = 0; tree < count; ++tree) sum += leaves[tree * kPlaces + at[tree] - kPlaces];
      below += kGroup * kPlaces;
      slot += kGroup * kPlaces;
      leaves += kGroup * kPlaces;
    }
    return sum;
  }

 private:
  KeyHeaps heaps_;
};

// Why these instructions cannot walk the model; nothing if they can.
std::optional<std::string> obstacle(const Model& model, Isa isa) {
  if (!can_run(isa)) return std::string("this processor has no ") + name_of(isa);
  switch (isa) {
    case Isa::kNodes:
      return std::nullopt;
    case Isa::kPortable:
      return heap_obstacle(model);
    case Isa::kNeon:
    case Isa::kAvx2:
    case Isa::kAvx512:
      return ByteLanes::obstacle(model);
  }
  return "no such walk";
}

std::unique_ptr<const Evaluator> make(const Model& model, Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return make_of_depth<PortableWalk>(model);
#if defined(__x86_64__)
    case Isa::kAvx2:
      return make_avx2(model);
    case Isa::kAvx512:
      return make_avx512(model);
#else
    case Isa::kNeon:
      return make_neon(model);
#endif
    default:
      break;
  }
  return std::make_unique<NodeWalk>(model);
}

}  // namespace

const char* name_of(Isa isa) noexcept {
  switch (isa) {
    case Isa::kNodes:
      return "nodes";
    case Isa::kPortable:
      return "portable";
    case Isa::kNeon:
      return "neon";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512vbmi";
  }
  return "unknown";
}

bool can_run(Isa isa) noexcept {
  switch (isa) {
    case Isa::kNodes:
    case Isa::kPortable:
      return true;
#if defined(__x86_64__)
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt");
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("popcnt");
#else
    case Isa::kNeon:
      return true;
#endif
    default:
      return false;
  }
}

void Evaluator::margins(const float* rows, std::size_t count, float* out) const noexcept {
  for (std::size_t i = 0; i < count; ++i) out[i] = margin(rows + i * features_);
}

bool can_walk(const Model& model, Isa isa) { return !obstacle(model, isa); }

std::unique_ptr<const Evaluator> make_evaluator(const Model& model) {
  for (const Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kNeon, Isa::kPortable}) {
    if (can_walk(model, isa)) return make(model, isa);
  }
  return make(model, Isa::kNodes);
}

std::unique_ptr<const Evaluator> make_evaluator(const Model& model, Isa isa) {
  if (const std::optional<std::string> why = obstacle(model, isa)) {
    throw ModelError(std::string("the walk '") + name_of(isa) + "' cannot be had: " + *why);
  }
  return make(model, isa);
}

std::unique_ptr<const Evaluator> load_evaluator(const std::string& path) {
  const SavedModel saved = import_model_file(path);
  std::unique_ptr<const Evaluator> evaluator = make_evaluator(saved.model);
  replay(*evaluator, saved, path);
  return evaluator;
}

void replay(const Evaluator& evaluator, const SavedModel& saved, const std::string& name) {
  for (std::size_t i = 0; i < saved.margins.size(); ++i) {
    const float margin = evaluator.margin(&saved.rows[i * saved.model.features]);
    if (std::bit_cast<std::uint32_t>(margin) != std::bit_cast<std::uint32_t>(saved.margins[i])) {
      throw ModelError(name + ": stored row " + std::to_string(i) + " gives " + std::to_string(margin) + " by " +
                       name_of(evaluator.isa()) + ", saved with it is " + std::to_string(saved.margins[i]) +
                       "; export the model again");
    }
  }
}

}  // namespace cudasched::predict::trees
