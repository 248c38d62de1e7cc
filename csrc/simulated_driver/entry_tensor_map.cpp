// Tensor maps: the refusals of cuTensorMapEncodeTiled, and a map that holds its arguments.
#include <cuda.h>

#include <cstring>

#include "simulated_driver/driver.hpp"

#pragma GCC visibility push(default)
extern "C" {

// Words of the map: address, type, rank, then sizes and box, five of each.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  constexpr cuuint32_t kMostSizes = 5;
  const auto start = reinterpret_cast<std::uintptr_t>(address);
  if (map == nullptr || sizes == nullptr || box == nullptr || steps == nullptr || rank == 0 || rank > kMostSizes ||
      (rank > 1 && strides == nullptr) || start % 16 != 0 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const cuuint64_t width = type == CU_TENSOR_MAP_DATA_TYPE_UINT8                                                 ? 1
                           : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2
                           : type == CU_TENSOR_MAP_DATA_TYPE_INT64 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT64    ? 8
                                                                                                                 : 4;
  const cuuint64_t most_inside = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE  ? ~cuuint64_t{0}
                                 : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                                                        : 128;
  if (box[0] * width % 16 != 0 || box[0] * width > most_inside) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || box[i] == 0 || box[i] > 256 || steps[i] == 0 || steps[i] > 8) return CUDA_ERROR_INVALID_VALUE;
    if (i + 1 < rank && strides[i] % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  }
  std::memset(map, 0, sizeof *map);
  map->opaque[0] = start;
  map->opaque[1] = static_cast<cuuint64_t>(type);
  map->opaque[2] = rank;
  for (cuuint32_t i = 0; i < rank; ++i) {
    map->opaque[3 + i] = sizes[i];
    map->opaque[3 + kMostSizes + i] = box[i];
  }
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
