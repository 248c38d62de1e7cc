#include "hook/entry_points.hpp"

#include <algorithm>

namespace cudasched::hook {

bool uses_memory(const EntryPoint* point) noexcept {
  if (point == nullptr) return true;
  switch (point->meaning) {
    case Meaning::kNone:
    case Meaning::kBeginCapture:
    case Meaning::kInstantiate:
    case Meaning::kChangeExec:
    case Meaning::kNamesMemory:
    case Meaning::kPinsMemory:
      return true;
    default:
      return false;
  }
}

const EntryPoint* find_symbol(std::string_view symbol) noexcept {
  const std::string_view plain = is_twin(symbol) ? symbol.substr(0, symbol.size() - 5) : symbol;
  const auto points = entry_points();
  const auto found = std::ranges::lower_bound(points, plain, {}, &EntryPoint::symbol);
  if (found == points.end() || found->symbol != plain) return nullptr;
  return plain == symbol || found->twin == symbol ? &*found : nullptr;
}

const EntryPoint* find_version(std::string_view name, int cuda_version) noexcept {
  const EntryPoint* found = nullptr;
  int newest = -1;
  const auto look = [&](const EntryPoint& point, std::string_view known_as, int since) {
    if (known_as != name || since > cuda_version || since <= newest) return;
    found = &point;
    newest = since;
  };
  for (const EntryPoint& point : entry_points()) {
    look(point, point.name, point.since);
    if (!point.alias.empty()) look(point, point.alias, point.alias_since);
  }
  return found;
}

}  // namespace cudasched::hook
