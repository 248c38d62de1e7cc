// A launch's features for the trees: one row of float32, from a Query alone.
//
// The one definition for training, evaluation and the launch path: Python gets it by `_core.launch_features`.
// Logarithms are base 2 with straight lines between the powers of two: a tree needs only the order, and such a
// logarithm costs a nanosecond. Words of the parameter block enter free of order: the greatest distinct sizes among
// them (1 < word < 2^28), their number, products. Pointers and host addresses are left out: Allocations knows pointers
// on line, recorded data has zeros in their place, and both give the same row. Where a kernel's block is known
// (work.hpp), the sizes of its work stand beside the words or in their place. A long block is then not searched.
// Nothing here is ever NaN.
//
// The trees' margin is the natural logarithm of the duration in nanoseconds.
//
// No allocation, no lock; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "predict/allocations.hpp"
#include "predict/launch.hpp"

namespace cudasched::predict {

inline constexpr std::array<std::string_view, 48> kFeatureNames{
    "log_blocks",
    "log_grid_x",
    "log_grid_y",
    "log_grid_z",
    "log_threads",  // of a block
    "log_block_x",
    "log_block_y",
    "log_cluster",  // blocks of a cluster
    "log_total_threads",
    "log_dynamic_shared",
    "log_static_shared",
    "registers",
    "log_local",
    "log_max_threads",
    "blocks_per_sm",
    "occupancy",  // threads resident of those that a multiprocessor can hold
    "log_waves",
    "whole_waves",  // rounded up, as a logarithm
    "tail",         // how full the last wave is
    "sm_count",
    "log_tile_m",
    "log_tile_n",
    "log_tile_k",
    "stages",
    "element_bytes",
    "vector_width",
    "family",
    "log_parameter_bytes",
    "log_size_1",  // the greatest size among the words, and so on down
    "log_size_2",
    "log_size_3",
    "log_size_4",
    "log_size_5",
    "log_size_6",
    "log_sizes",  // how many words are sizes
    "log_product_2",
    "log_product_3",
    "log_product_4",
    "log_tile_work",     // blocks x tile M x tile N x greatest size, over the multiprocessors
    "log_wave_work",     // whole waves x greatest size
    "log_thread_work",   // threads x elements a thread takes at once x bytes of an element
    "log_thread_share",  // greatest size a thread
    "log_work_m",        // of M and N the greater, and so on: see work.hpp
    "log_work_n",
    "log_work_k",
    "log_work",           // their product
    "log_work_share",     // of that, a multiprocessor that has any
    "log_work_greatest",  // matrix of the three
};

inline constexpr std::size_t kFeatureCount = kFeatureNames.size();

// The reason why trees of `count` features of these names cannot answer for launches: "it lacks log_blocks"; empty
// where they can. Trees without names go by their count. Allocates.
std::string features_apart(std::span<const std::string> names, std::size_t count);

// `row` has room for kFeatureCount values. Without `allocations`, a word that looks like an address is a pointer.
void features(const Query& query, const Allocations* allocations, float* row) noexcept;

}  // namespace cudasched::predict
