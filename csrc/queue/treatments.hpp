// How each driver function is treated while something may be queued (docs/order.md, The three treatments): a table by
// families, each with its reason. An entry stands for every version and per-thread twin of its name ("cuMemFree" for
// cuMemFree_v2). A function that no family names is drained to the end of the ring.
//
// Looked up when the hook is set up, never on the launch path.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "queue/order.hpp"

namespace cudasched::queue {

enum class Treatment : std::uint8_t {
  kDeferred,  // into the ring where the rules allow it; else drained by `scope`, and a launch gated
  kGated,     // a launch that is never deferred: drained by `scope`, gated, direct
  kDrained,   // drained by `scope`, direct
  kDirect,    // neither observes nor changes what is queued
};

struct Rule {
  Treatment treatment = Treatment::kDrained;
  Scope scope = Scope::kEnd;
  // Which argument, from 0, is the stream or event that the scope speaks of; with kStreamAndEvent the stream, with
  // kTwoEvents the first one (the second follows). All of them are passed in registers (0 to 5). -1: the scope has
  // none.
  std::int8_t argument = -1;

  bool operator==(const Rule&) const = default;
};

struct Family {
  Rule rule;
  std::string_view why;
  std::string_view names;  // separated by blanks, without _v2, _ptsz and the like
};

std::span<const Family> families() noexcept;

// "cuMemcpyHtoDAsync_v2_ptsz" -> "cuMemcpyHtoDAsync".
std::string_view base_name(std::string_view symbol) noexcept;

// Is this the twin whose stream 0 is the per-thread default stream?
constexpr bool is_per_thread(std::string_view symbol) noexcept {
  return symbol.ends_with("_ptsz") || symbol.ends_with("_ptds");
}

Rule rule_of(std::string_view symbol) noexcept;

}  // namespace cudasched::queue
