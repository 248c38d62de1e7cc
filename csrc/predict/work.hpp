// The place of the amount of work in a kernel's parameter block, for kernels whose block is known by their name. These
// are the libraries' matrix products, convolutions, reductions, scans and optimizers, which take most GPU time. Their
// blocks are full of words that only look like sizes (strides, steps, flags of tensor maps, numbers of earlier
// launches).
//
// A block whose length differs from the table is one of another version, and is not read.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace cudasched::predict {

// The sizes of the work, as logarithms to the base 2; 0: not known. A product of matrices is m x k times k x n; of m x
// n others, k values each become one. Of a list of tensors, m is the elements of all, k of the largest.
struct WorkSizes {
  float log_m = 0;
  float log_n = 0;
  float log_k = 0;
  bool is_all = false;  // the block's other sizes say nothing more
};

// A number for a kernel's name, demangled and in lower case; 0: the kernel's block is not known.
std::uint8_t layout_of(std::string_view name) noexcept;

// `words` is the block, `blocks` are those of the launch.
WorkSizes work_sizes(std::uint8_t layout, std::span<const std::uint32_t> words, std::uint64_t blocks) noexcept;

// The launch's least work: bytes of its operands, each once, and additions and multiplications. 0: not known.
struct Work {
  double bytes = 0;
  double flops = 0;
};

// Of products of matrices both; of convolutions the operations; of reductions, scans, softmax and lists of tensors the
// bytes. `element_bytes` is that of the first type in the kernel's name; 0: the bytes are not known.
Work work_of(std::uint8_t layout, std::span<const std::uint32_t> words, std::uint64_t blocks,
             std::uint32_t element_bytes) noexcept;

// A hash of the words that tell launches of this kernel apart, where the block is known to hold more than those. For a
// list of tensors, the elements of each tensor that the launch works on; for a PyTorch reduction its configuration,
// sizes and strides. The rest of these blocks is stack contents of earlier calls. 0: all words of the block count.
std::uint64_t work_key(std::uint8_t layout, std::span<const std::uint32_t> words, std::uint64_t blocks) noexcept;

}  // namespace cudasched::predict
