// A kernel by the driver's facts and its name: read once at the first launch, never changed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace cudasched::predict {

// A kernel's kind of work, by its name. The numbers are a tree feature and never change.
enum class Family : std::uint8_t {
  kOther = 0,
  kGemm = 1,
  kConvolution = 2,
  kAttention = 3,
  kNormalisation = 4,
  kSoftmax = 5,
  kElementwise = 6,
  kReduction = 7,
  kSortScan = 8,
  kIndex = 9,  // gather, scatter, embedding
  kCopy = 10,  // copy, concatenation, transpose
  kOptimizer = 11,
  kTriton = 12,
  kMemory = 13,  // fill, set
};

// Facts in a kernel's name about its way of working; see traits_of().
struct NameTraits {
  std::uint16_t tile[3] = {0, 0, 0};  // "128x256x64": M, N, K of a tile; 0 where the name has none
  std::uint8_t stages = 0;            // of a software pipeline, 0 where the name has none
  std::uint8_t element_bytes = 0;     // of the first element type named, which is an input's; 0 where there is none
  std::uint8_t vector_width = 0;      // elements a thread takes at once; 0 where the name does not say
  std::uint8_t family = 0;            // enum Family
  std::uint8_t layout = 0;            // of the parameter block; see work.hpp
  bool is_collective = false;         // waits for kernels of other GPUs: NCCL, NVSHMEM and other all-reduces
  bool is_library = false;            // a library's, by its name: the user cannot change its launch shape
  std::uint32_t library = 0;          // hash of the name's beginning: a namespace, or a prefix as nvjet's
};

struct Function {
  static constexpr std::uint32_t kMaxParameterBytes = 4096;

  std::uint64_t identity = 0;         // the same kernel has the same in every run: see identity_of(); never 0
  std::uint32_t index = 0;            // dense, in the order of their first launches
  std::uint32_t parameter_bytes = 0;  // of the block, at most kMaxParameterBytes; 0: unknown or none
  std::uint32_t registers = 0;        // a thread
  std::uint32_t local_bytes = 0;      // a thread
  std::uint32_t static_shared_bytes = 0;
  std::uint32_t max_threads = 0;  // a block
  NameTraits traits;
};

// The whole name with template arguments and parameters; the input where that is not mangled or cannot be read.
// Allocates.
std::string demangled(std::string_view mangled_name);

// Allocates; off the launch path. A name that cannot be demangled is read unchanged. Throws only std::bad_alloc.
NameTraits traits_of(std::string_view mangled_name);

// Hash of the mangled name and of the attributes that `function` has (not its index, traits and identity); never 0.
// Two builds of one kernel that differ in registers or shared memory are two kernels.
std::uint64_t identity_of(std::string_view mangled_name, const Function& function) noexcept;

}  // namespace cudasched::predict
