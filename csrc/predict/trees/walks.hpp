// The byte walks' makers, each in a source file whose functions are compiled for its instructions; call only where
// can_run() says so.
#pragma once

#include <memory>

#include "predict/trees/evaluator.hpp"
#include "predict/trees/layout.hpp"

namespace cudasched::predict::trees {

std::unique_ptr<const Evaluator> make_avx2(const Model& model);    // x86-64
std::unique_ptr<const Evaluator> make_avx512(const Model& model);  // x86-64
std::unique_ptr<const Evaluator> make_neon(const Model& model);    // arm64

// The walk for trees of the model's depth.
template <template <int> typename Walk, int kDepth = 1>
std::unique_ptr<const Evaluator> make_of_depth(const Model& model) {
  if constexpr (kDepth < kMaxHeapDepth) {
    if (model.depth() > kDepth) return make_of_depth<Walk, kDepth + 1>(model);
  }
  return std::make_unique<Walk<kDepth>>(model);
}

}  // namespace cudasched::predict::trees
