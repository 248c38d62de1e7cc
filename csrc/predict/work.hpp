// Where a kernel's parameter block says how much there is to do, for kernels whose block is known by their name: the
// libraries' matrix products, convolutions, reductions, scans and optimizers, which most GPU time goes to and whose
// blocks are full of what only looks like sizes (strides, steps, flags of tensor maps, numbers of earlier launches).
//
// A block of another length than the table has is one of another version, and is not read.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace cudasched::predict {

// The sizes of the work, as logarithms to the base 2; 0 where they are not known. A product of matrices is m x k times
// k x n; of m x n others, k values each become one. Of a list of tensors, m is the elements of all, k of the largest.
struct WorkSizes {
  float log_m = 0;
  float log_n = 0;
  float log_k = 0;
  bool is_all = false;  // the block's other sizes say nothing more
};

// A number for a kernel's name, demangled and in lower case; 0: its block is not known.
std::uint8_t layout_of(std::string_view name) noexcept;

// `words` is the block, `blocks` are those of the launch.
WorkSizes work_sizes(std::uint8_t layout, std::span<const std::uint32_t> words, std::uint64_t blocks) noexcept;

// What the launch has to do at least: bytes of its operands, each once, and additions and multiplications. 0: not
// known.
struct Work {
  double bytes = 0;
  double flops = 0;
};

// Of products of matrices both; of convolutions the operations; of reductions, scans, softmax and lists of tensors the
// bytes. `element_bytes` is that of the first type in the kernel's name; 0: nothing is known of bytes.
Work work_of(std::uint8_t layout, std::span<const std::uint32_t> words, std::uint64_t blocks,
             std::uint32_t element_bytes) noexcept;

// A hash of what tells launches of this kernel apart, where the block is known to hold more than that: of a list of
// tensors the elements of each tensor that the launch works on, of a PyTorch reduction its configuration, sizes and
// strides. The rest of these blocks is what earlier calls left on the stack. 0: all words of the block count.
std::uint64_t work_key(std::uint8_t layout, std::span<const std::uint32_t> words, std::uint64_t blocks) noexcept;

}  // namespace cudasched::predict
