"""A kernel of CuPy's in blocks of 32 threads; with `shapes`, in blocks of many sizes and with much shared memory."""

import sys

import cupy

SOURCE = r"""
extern "C" __global__ void narrow(float* y, const float* x, float a, int n) {
  extern __shared__ float room[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (n < 0) room[threadIdx.x] = x[i];
  if (i < n) y[i] += a * x[i] + (n < 0 ? room[0] : 0.0f);
}
"""

kernel = cupy.RawKernel(SOURCE, "narrow")
count = 1 << 23
x, y = cupy.ones(count, dtype=cupy.float32), cupy.zeros(count, dtype=cupy.float32)
launches = 0
if sys.argv[1:] == ["shapes"]:
    kernel.max_dynamic_shared_size_bytes = 200 << 10
    for threads in (32, 33, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
        for shared in (0, 1, 1000, 20_000, 48 << 10, 100_000, 200 << 10):
            kernel((-(-count // threads),), (threads,), (y, x, cupy.float32(2), cupy.int32(count)), shared_mem=shared)
            launches += 1
else:
    for _ in range(100):
        kernel((count // 32,), (32,), (y, x, cupy.float32(2), cupy.int32(count)))
        launches += 1
assert float(y[0]) == float(y[-1]) == 2 * launches
print("done", launches)
