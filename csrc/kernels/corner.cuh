// Addresses of fragments in swizzled tiles of elements of two bytes, for flash attention and convolution.
#pragma once

#include "mma.cuh"

namespace cudasched::kernels {

// A lane's offset from the address of a tile with rows of `RowBytes`. It loads four matrices of 8 x 8 whose first row
// and first column are multiples of 16. `Down`: the second matrix is below the first one and the third beside it (an A,
// or a B by transposed loads). Else the other way round (two B of 8 columns each, of a matrix that is stored by
// columns).
template <int RowBytes, bool Down>
class Corner {
 public:
  __device__ __forceinline__ explicit Corner(int lane)
      : offset_(swizzle<RowBytes>(lane % 8 + (Down ? lane / 8 % 2 : lane / 16) * 8,
                                  (Down ? lane / 16 : lane / 8 % 2) * 16)) {}

  // From row `row` and byte `byte` on, multiples of 16 and 32. The swizzle of rows repeats at least every 16 rows, and
  // such a byte shares no bit with a lane's offset.
  __device__ __forceinline__ const unsigned char* in(const unsigned char* tile, int row, int byte) const {
    static_assert(RowBytes == 64 || RowBytes % 128 == 0, "the swizzle repeats every 16 rows");
    return tile + row * RowBytes + (offset_ ^ byte);
  }

 private:
  int offset_;
};

}  // namespace cudasched::kernels
