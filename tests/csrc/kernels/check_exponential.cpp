// Prints the largest relative error of exponential2_by_polynomial (csrc/kernels/attention.cuh) over what softmax asks
// for, and what it makes of an infinity, of a value below the smallest power, and of NaN.
// tests/python/test_kernels_attention.py builds and runs it.
#include "emulate.hpp"

#define EMULATED_MMA "emulate_mma.hpp"
#include "attention.cuh"

int main() {
  using cudasched::kernels::exponential2_by_polynomial;
  double worst = 0;
  for (float value = -126.0f; value <= 8.0f; value += 0.00137f) {
    worst = std::max(worst, std::abs(exponential2_by_polynomial(value) / std::exp2(double{value}) - 1));
  }
  std::printf("%g %g %g %g\n", worst, exponential2_by_polynomial(-INFINITY), exponential2_by_polynomial(-127.0f),
              exponential2_by_polynomial(NAN));
}
