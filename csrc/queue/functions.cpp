#include "queue/functions.hpp"

#include <algorithm>

namespace cudasched::queue {

bool Functions::find(std::uint64_t function, Signature& signature) const noexcept {
  const Entry* entry = entries_.find(function);
  if (entry == nullptr) return false;
  signature = {std::span(parameters_).subspan(entry->first, entry->count), entry->block_bytes, entry->generation};
  return true;
}

bool Functions::learn(std::uint64_t function, std::span<const Parameter> parameters) noexcept {
  if (entries_.find(function) != nullptr) return true;
  if (parameters.size() > kMaxParameters || parameters_used_ + parameters.size() > parameters_.size()) return false;
  Entry* entry = entries_.add(function);
  if (entry == nullptr) return false;
  entry->first = static_cast<std::uint16_t>(parameters_used_);
  entry->count = static_cast<std::uint16_t>(parameters.size());
  entry->generation = ++generation_;
  for (const Parameter& parameter : parameters) {
    entry->block_bytes =
        std::max(entry->block_bytes, std::uint32_t{parameter.offset_bytes} + std::uint32_t{parameter.bytes});
  }
  std::copy(parameters.begin(), parameters.end(), parameters_.begin() + static_cast<std::ptrdiff_t>(parameters_used_));
  parameters_used_ += parameters.size();
  return true;
}

void Functions::succeeded(std::uint64_t like) noexcept {
  if (likes_.add(like) != nullptr) return;
  likes_.clear();  // each goes directly once more
  likes_.add(like);
}

void Functions::changed(std::uint64_t function) noexcept {
  if (Entry* entry = entries_.find(function)) entry->generation = ++generation_;
}

void Functions::forget_functions() noexcept {
  entries_.clear();
  likes_.clear();
  parameters_used_ = 0;
}

void Functions::graph_instantiated(std::uint64_t graph, bool plain) noexcept {
  graphs_.remove(graph);
  if (!plain) return;
  if (bool* launched = graphs_.add(graph)) *launched = false;
}

void Functions::graph_launched(std::uint64_t graph) noexcept {
  if (bool* launched = graphs_.find(graph)) *launched = true;
}

void Functions::graph_changed(std::uint64_t graph) noexcept {
  if (bool* launched = graphs_.find(graph)) *launched = false;
}

bool Functions::may_defer_graph(std::uint64_t graph) const noexcept {
  const bool* launched = graphs_.find(graph);
  return launched != nullptr && *launched;
}

}  // namespace cudasched::queue
