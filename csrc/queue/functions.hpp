// What must be known of a kernel or graph before its launches may be deferred: where its parameters lie, and that its
// like has succeeded once directly.
//
// The first launch of a function with a given block, shared memory and attributes goes directly: it may fail with an
// error that libraries fall back on, and it may load lazily, which can synchronise the context. A like is known by a
// hash; a hash that two of them share would defer one first launch, whose error then comes late.
//
// Everything is called under the queue's lock. Fixed tables; a function that finds no place is never deferred.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "queue/fixed_map.hpp"

namespace cudasched::queue {

struct Parameter {
  std::uint16_t offset_bytes = 0;
  std::uint16_t bytes = 0;
};

class Functions {
 public:
  static constexpr std::size_t kMaxParameters = 1024;

  struct Signature {
    std::span<const Parameter> parameters;
    std::uint32_t block_bytes = 0;  // of all parameters with their gaps
    std::uint64_t generation = 0;   // part of the hash of its likes: new attributes, new likes
  };

  bool find(std::uint64_t function, Signature& signature) const noexcept;
  // False where the tables are full.
  bool learn(std::uint64_t function, std::span<const Parameter> parameters) noexcept;

  bool succeeded_once(std::uint64_t like) const noexcept { return likes_.find(like) != nullptr; }
  void succeeded(std::uint64_t like) noexcept;

  // The function's attributes changed: its likes have yet to succeed.
  void changed(std::uint64_t function) noexcept;
  // Modules go, and handles come back for something else.
  void forget_functions() noexcept;
  void forget_graphs() noexcept { graphs_.clear(); }

  // Executable graphs: deferred from their second launch on, if nothing in them is seen outside of their stream.
  void graph_launched(std::uint64_t graph) noexcept;
  void graph_instantiated(std::uint64_t graph, bool plain) noexcept;
  void graph_changed(std::uint64_t graph) noexcept;  // updated: the next launch goes directly
  void graph_destroyed(std::uint64_t graph) noexcept { graphs_.remove(graph); }
  bool may_defer_graph(std::uint64_t graph) const noexcept;

 private:
  struct Entry {
    std::uint16_t first = 0;
    std::uint16_t count = 0;
    std::uint32_t block_bytes = 0;
    std::uint64_t generation = 0;
  };
  struct Nothing {};

  FixedMap<Entry, 4096> entries_;
  FixedMap<Nothing, 8192> likes_;
  FixedMap<bool, 2048> graphs_;  // plain ones; true: launched once
  std::array<Parameter, 32768> parameters_{};
  std::size_t parameters_used_ = 0;
  std::uint64_t generation_ = 0;
};

}  // namespace cudasched::queue
