// The refusal of a call: what finds the fault throws, and the entry point (with_driver) returns the result.
#pragma once

#include <cuda.h>

#include <exception>

namespace cudasched::simulated_driver {

struct Refused : std::exception {
  explicit Refused(CUresult why) : result(why) {}
  CUresult result;
};

inline void require(bool holds, CUresult otherwise = CUDA_ERROR_INVALID_VALUE) {
  if (!holds) throw Refused(otherwise);
}

}  // namespace cudasched::simulated_driver
