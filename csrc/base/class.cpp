#include "base/class.hpp"

namespace cudasched {

std::string_view class_name(Class value) noexcept {
  switch (value) {
    case Class::kLatency:
      return "latency";
    case Class::kBestEffort:
      return "best_effort";
    case Class::kNormal:
      break;
  }
  return "normal";
}

std::optional<Class> parse_class(std::string_view name) noexcept {
  if (name == "normal") return Class::kNormal;
  if (name == "latency") return Class::kLatency;
  if (name == "best_effort" || name == "best-effort") return Class::kBestEffort;
  return std::nullopt;
}

}  // namespace cudasched
