#include "predict/trees/layout.hpp"

#include <algorithm>
#include <limits>

namespace cudasched::predict::trees {
namespace {

constexpr std::uint32_t kUnused = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint8_t kAlwaysLeft = 255;  // no bin is above it

// At least one level, so that a model of lone leaves needs no case of its own.
int heap_depth(const Model& model) { return std::max(model.depth(), 1); }

std::vector<std::vector<float>> thresholds_of(const Model& model) {
  std::vector<std::vector<float>> thresholds(model.features);
  for (const Tree& tree : model.trees) {
    for (const Node& node : tree.nodes) {
      if (!node.is_leaf()) thresholds[node.feature].push_back(node.value);
    }
  }
  for (std::vector<float>& one : thresholds) {
    std::sort(one.begin(), one.end());
    one.erase(std::unique(one.begin(), one.end()), one.end());
  }
  return thresholds;
}

// Heap places count level by level with the root's turn in the highest bit; lanes have it in the lowest.
std::size_t reversed(std::size_t turns, int count) {
  std::size_t result = 0;
  for (int i = 0; i < count; ++i) result |= (turns >> i & 1) << (count - 1 - i);
  return result;
}

}  // namespace

std::vector<HeapNode> heap_of(const Tree& tree, int depth) {
  std::vector<HeapNode> heap((std::size_t{2} << depth) - 1);
  const auto place = [&](std::size_t at, std::int32_t index) {
    const Node& node = tree.nodes[static_cast<std::size_t>(index)];
    heap[at] = node.is_leaf() ? HeapNode{nullptr, node.value} : HeapNode{&node, 0};
  };
  place(0, 0);
  for (std::size_t at = 0; 2 * at + 2 < heap.size(); ++at) {
    if (heap[at].split != nullptr) {
      place(2 * at + 1, heap[at].split->left);
      place(2 * at + 2, heap[at].split->right);
    } else {
      heap[2 * at + 1] = heap[2 * at + 2] = heap[at];
    }
  }
  return heap;
}

Slots::Slots(const Model& model) : index_(2 * std::size_t{model.features}, kUnused) {
  for (const Tree& tree : model.trees) {
    for (const Node& node : tree.nodes) {
      if (node.is_leaf()) continue;
      std::uint32_t& index = index_[2 * node.feature + (node.default_left ? 1 : 0)];
      if (index != kUnused) continue;
      index = static_cast<std::uint32_t>(slots_.size());
      slots_.push_back({node.feature, node.default_left});
    }
  }
}

std::optional<std::string> heap_obstacle(const Model& model) {
  const int depth = heap_depth(model);
  if (depth > kMaxHeapDepth) {
    return "trees are " + std::to_string(depth) + " deep, heaps at most " + std::to_string(kMaxHeapDepth);
  }
  const std::size_t groups = (model.trees.size() + KeyHeaps::kGroup - 1) / KeyHeaps::kGroup;
  const std::size_t bytes_per_tree = (std::size_t{1} << depth) * (sizeof(std::uint32_t) + sizeof(float) + 1);
  if (groups * KeyHeaps::kGroup * bytes_per_tree > kMaxHeapBytes) {
    return "heaps would take more than " + std::to_string(kMaxHeapBytes) + " bytes";
  }
  if (const std::size_t count = Slots(model).size(); count > KeyHeaps::kMaxSlots) {
    return "the splits use " + std::to_string(count) + " slots, heaps at most " + std::to_string(KeyHeaps::kMaxSlots);
  }
  return std::nullopt;
}

KeyHeaps::KeyHeaps(const Model& model)
    : depth(heap_depth(model)), trees(model.trees.size()), base_score(model.base_score), slots(model) {
  const std::size_t padded = (trees + kGroup - 1) / kGroup * kGroup;
  const std::size_t places = std::size_t{1} << depth;
  below.resize(padded * places);
  slot.resize(padded * places);
  leaves.resize(padded * places);
  for (std::size_t tree = 0; tree < trees; ++tree) {
    const std::vector<HeapNode> heap = heap_of(model.trees[tree], depth);
    for (std::size_t i = 1; i < places; ++i) {
      const Node* split = heap[i - 1].split;
      if (split == nullptr) continue;
      below[tree * places + i] = order_key(split->value) - 1;
      slot[tree * places + i] = static_cast<std::uint8_t>(slots.of(*split));
    }
    for (std::size_t i = 0; i < places; ++i) leaves[tree * places + i] = heap[places - 1 + i].leaf;
  }
}

std::optional<std::string> ByteLanes::obstacle(const Model& model) {
  if (std::optional<std::string> obstacle = heap_obstacle(model)) return obstacle;
  for (const std::vector<float>& one : thresholds_of(model)) {
    if (one.size() > kMaxThresholds) {
      return "a feature has " + std::to_string(one.size()) + " thresholds, bytes hold at most " +
             std::to_string(kMaxThresholds);
    }
  }
  if (const std::size_t count = Slots(model).size(); count > kMaxSlots) {
    return "the splits use " + std::to_string(count) + " slots, a register holds at most " + std::to_string(kMaxSlots);
  }
  return std::nullopt;
}

ByteLanes::ByteLanes(const Model& model)
    : depth(heap_depth(model)),
      trees(model.trees.size()),
      blocks((trees + kLanes - 1) / kLanes),
      slots(0),
      base_score(model.base_score) {
  const Slots all_slots(model);
  slots = all_slots.size();
  const std::vector<std::vector<float>> thresholds = thresholds_of(model);
  for (std::uint32_t f = 0; f < model.features; ++f) {
    const std::vector<float>& own = thresholds[f];
    if (own.empty()) continue;
    Bins one;
    one.pivots.fill(std::numeric_limits<float>::quiet_NaN());
    one.thresholds.fill(std::numeric_limits<float>::quiet_NaN());
    std::copy(own.begin(), own.end(), one.thresholds.begin());
    for (std::size_t run = 0; run < 16; ++run) one.pivots[run] = one.thresholds[16 * run + 15];
    bins.push_back(one);
    features.push_back({f, kMaxSlots, kMaxSlots});
    for (std::size_t slot = 0; slot < slots; ++slot) {
      if (all_slots[slot].feature != f) continue;
      (all_slots[slot].missing_left ? features.back().missing_left_slot : features.back().missing_right_slot) =
          static_cast<std::uint8_t>(slot);
    }
  }

  const std::size_t inner = (std::size_t{1} << depth) - 1;
  lanes.resize(blocks * 2 * inner);
  leaves.resize(trees * (inner + 1));
  for (std::size_t block = 0; block < blocks; ++block) {
    for (std::size_t i = 0; i < inner; ++i) {
      lanes[(block * inner + i) * 2].bytes.fill(0);
      lanes[(block * inner + i) * 2 + 1].bytes.fill(kAlwaysLeft);
    }
  }
  for (std::size_t tree = 0; tree < trees; ++tree) {
    const std::vector<HeapNode> heap = heap_of(model.trees[tree], depth);
    for (int level = 0; level < depth; ++level) {
      const std::size_t width = std::size_t{1} << level;
      for (std::size_t i = 0; i < width; ++i) {
        const Node* split = heap[width - 1 + i].split;
        if (split == nullptr) continue;
        const std::vector<float>& own = thresholds[split->feature];
        const auto rank = std::lower_bound(own.begin(), own.end(), split->value) - own.begin();
        Lane64* node = &lanes[(tree / kLanes * inner + width - 1 + reversed(i, level)) * 2];
        node[0].bytes[tree % kLanes] = static_cast<std::uint8_t>(all_slots.of(*split));
        node[1].bytes[tree % kLanes] = static_cast<std::uint8_t>(rank);
      }
    }
    for (std::size_t i = 0; i <= inner; ++i) {
      leaves[tree * (inner + 1) + reversed(i, depth)] = heap[inner + i].leaf;
    }
  }
}

}  // namespace cudasched::predict::trees
