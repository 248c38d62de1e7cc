// The byte walks' makers, each in a source file whose functions are compiled for its instructions; call only where
// can_run() says so.
#pragma once

#include <memory>

#include "predict/trees/evaluator.hpp"

namespace cudasched::predict::trees {

std::unique_ptr<const Evaluator> make_avx2(const Model& model);    // x86-64
std::unique_ptr<const Evaluator> make_avx512(const Model& model);  // x86-64
std::unique_ptr<const Evaluator> make_neon(const Model& model);    // arm64

}  // namespace cudasched::predict::trees
