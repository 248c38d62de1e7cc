// The predictor's files: the model, and the learned state of a GPU, kept between runs.
//
// The state of a GPU is one file a user, named by the GPU's UUID, in CUDASCHED_CACHE_DIR, else
// $XDG_CACHE_HOME/cudasched, else ~/.cache/cudasched. It is replaced whole, so that a reader never sees half of one; of
// several programs that end at once the last one's is kept. Nothing here is on the launch path.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "predict/trees/evaluator.hpp"
#include "runtime/settings.hpp"

namespace cudasched::runtime {

// The trees of CUDASCHED_MODEL: a file, or of a directory the one for this architecture (`sm_90.ubj`, or .json).
// Without it, those of the directory `models` beside the state, where `cudasched train` puts them, else of
// predictor/models beside this library. Null where there is none, which is said once; so is that the model was trained
// on another GPU of this architecture. `gpu` is the device's name. Throws ModelError where the model is of another
// architecture or of other features.
std::unique_ptr<const predict::trees::Evaluator> load_trees(const Settings& settings, int compute_major,
                                                            int compute_minor, const std::string& gpu);

// Where the state of this GPU is; empty where nothing is to be kept.
std::string state_path(const Settings& settings, const std::string& gpu_uuid);

// Empty where there is no such file. Throws StateError for one that is too long to be ours or cannot be read.
std::vector<std::byte> read_state(const std::string& path);

// Throws StateError. Makes the directory if there is none.
void write_state(const std::string& path, std::span<const std::byte> state);

}  // namespace cudasched::runtime
