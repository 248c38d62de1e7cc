"""CuPy: images filtered, signals analysed, equations solved, and kernels of one's own."""

# mypy: ignore-errors

from __future__ import annotations

import functools

import cupy as cp

from training.record import Parts

HEAT = r"""
extern "C" __global__ void heat(const float* from, float* to, int rows, int columns, float rate) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x;
  const int y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x <= 0 || y <= 0 || x >= columns - 1 || y >= rows - 1) return;
  const int at = y * columns + x;
  const float around = from[at - 1] + from[at + 1] + from[at - columns] + from[at + columns];
  to[at] = from[at] + rate * (around - 4.0f * from[at]);
}
"""
JULIA = r"""
extern "C" __global__ void julia(unsigned char* out, int side, int most, float re, float im) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= side * side) return;
  float x = 3.0f * (at % side) / side - 1.5f, y = 3.0f * (at / side) / side - 1.5f;
  int count = 0;
  for (; count < most && x * x + y * y < 4.0f; ++count) {
    const float next = x * x - y * y + re;
    y = 2.0f * x * y + im;
    x = next;
  }
  out[at] = count;
}
"""
BODIES = r"""
extern "C" __global__ void bodies(const float4* all, float4* pull, int count) {
  extern __shared__ float4 tile[];
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  const float4 mine = at < count ? all[at] : make_float4(0, 0, 0, 0);
  float3 sum = make_float3(0, 0, 0);
  for (int base = 0; base < count; base += blockDim.x) {
    tile[threadIdx.x] = base + threadIdx.x < count ? all[base + threadIdx.x] : make_float4(0, 0, 0, 0);
    __syncthreads();
    for (int i = 0; i < blockDim.x; ++i) {
      const float dx = tile[i].x - mine.x, dy = tile[i].y - mine.y, dz = tile[i].z - mine.z;
      const float near = rsqrtf(dx * dx + dy * dy + dz * dz + 0.01f);
      const float force = tile[i].w * near * near * near;
      sum.x += dx * force; sum.y += dy * force; sum.z += dz * force;
    }
    __syncthreads();
  }
  if (at < count) pull[at] = make_float4(sum.x, sum.y, sum.z, 0);
}
"""


def heat(rows: int, columns: int, steps: int, block: tuple[int, int]) -> None:
    """A stencil, again and again."""
    kernel = cp.RawKernel(HEAT, "heat")
    a, b = cp.random.rand(rows, columns, dtype=cp.float32), cp.zeros((rows, columns), cp.float32)
    grid = (-(-columns // block[0]), -(-rows // block[1]))
    for _ in range(steps):
        kernel(grid, block, (a, b, cp.int32(rows), cp.int32(columns), cp.float32(0.2)))
        a, b = b, a


def julia(side: int, most: int) -> None:
    """Work that depends on the point."""
    out = cp.empty(side * side, cp.uint8)
    kernel = cp.RawKernel(JULIA, "julia")
    for i in range(3):
        kernel(
            (-(-side * side // 256),),
            (256,),
            (out, cp.int32(side), cp.int32(most), cp.float32(-0.8 + i / 20), cp.float32(0.156)),
        )


def bodies(count: int, block: int) -> None:
    """Each pulls each, by way of shared memory."""
    all_, pull = cp.random.rand(count, 4, dtype=cp.float32), cp.empty((count, 4), cp.float32)
    kernel = cp.RawKernel(BODIES, "bodies")
    for _ in range(3):
        kernel((-(-count // block),), (block,), (all_, pull, cp.int32(count)), shared_mem=16 * block)
        all_[:, :3] += 1e-3 * pull[:, :3]


def image(rows: int, columns: int) -> None:
    """Grey levels, contrast, gradients, a histogram."""
    picture = cp.random.randint(0, 256, (rows, columns, 3)).astype(cp.uint8)
    grey = (picture.astype(cp.float32) * cp.asarray([0.3, 0.59, 0.11], cp.float32)).sum(axis=2)
    low, high = cp.percentile(grey, 2), cp.percentile(grey, 98)
    grey = cp.clip((grey - low) / (high - low), 0, 1)
    dy, dx = cp.gradient(grey)
    edges = cp.hypot(dx, dy)
    counts = cp.histogram(edges, bins=64)[0]
    cp.where(edges > edges.mean() + 2 * edges.std(), grey, 0).sum()
    cp.cumsum(counts)
    cp.roll(cp.flip(grey, 0), 7, 1).T.copy()


def blurred(rows: int, columns: int, sigma: float) -> None:
    """Filters of cupyx."""
    from cupyx.scipy import ndimage

    picture = cp.random.rand(rows, columns, dtype=cp.float32)
    ndimage.gaussian_filter(picture, sigma)
    ndimage.median_filter(picture, 3)
    ndimage.zoom(picture, 0.5, order=1)
    ndimage.label(picture > 0.6)


def signal(count: int, channels: int) -> None:
    """Spectra of several channels, and their strongest lines."""
    time = cp.linspace(0, 1, count, dtype=cp.float32)
    waves = cp.sin(2 * cp.pi * time[None, :] * cp.arange(1, channels + 1, dtype=cp.float32)[:, None] * 17)
    waves += 0.1 * cp.random.standard_normal((channels, count), dtype=cp.float32)
    spectrum = cp.fft.rfft(waves * cp.hanning(count).astype(cp.float32), axis=1)
    power = cp.abs(spectrum) ** 2
    cp.argsort(power, axis=1)[:, -4:]
    cp.fft.irfft(cp.where(power > power.mean(), spectrum, 0), n=count, axis=1)


def equations(size: int, right: int) -> None:
    """A positive definite system, least squares of it, and what is left."""
    a = cp.random.rand(size, size, dtype=cp.float32)
    a = a @ a.T + size * cp.eye(size, dtype=cp.float32)
    b = cp.random.rand(size, right, dtype=cp.float32)
    x = cp.linalg.solve(a, b)
    cp.linalg.cholesky(a)
    cp.linalg.norm(a @ x - b)


def eigen(size: int, powers: int) -> None:
    """The largest eigenvalue by iteration, in double precision."""
    a = cp.random.rand(size, size)
    v = cp.ones(size)
    for _ in range(powers):
        v = a @ v
        v /= cp.linalg.norm(v)
    cp.einsum("i,ij,j->", v, a, v)


def records(count: int, kinds: int) -> None:
    """Grouping: sort, unique, bincount, means."""
    kind = cp.random.randint(0, kinds, count)
    value = cp.random.rand(count, dtype=cp.float32)
    order = cp.argsort(kind)
    sums = cp.bincount(kind, value, kinds)
    sums / cp.maximum(cp.bincount(kind, minlength=kinds), 1)
    cp.unique(kind[order][: count // 2])
    cp.partition(value, count // 10)
    value[kind == 3].sum()


def paths(count: int, steps: int) -> None:
    """An option's price by random paths, with a kernel of its own."""
    step = cp.ElementwiseKernel(
        "float32 price, float32 noise, float32 drift, float32 spread",
        "float32 next",
        "next = price * expf(drift + spread * noise)",
        "price_step",
    )
    prices = cp.full(count, 100, cp.float32)
    for _ in range(steps):
        prices = step(prices, cp.random.standard_normal(count, dtype=cp.float32), 1e-4, 1e-2)
    gain = cp.ReductionKernel("float32 p, float32 k", "float32 s", "max(p - k, 0.0f)", "a + b", "s = a", "0", "gain")
    gain(prices, cp.float32(101))


def scaled(factor: float, value: int) -> int:
    """A size, scaled."""
    return max(8, int(value * factor))


def parts(tiny: bool) -> Parts:
    """Each with three shapes, three times over."""
    few = 4 if tiny else 1
    for turn in range(1 if tiny else 3):
        for i, scale in enumerate((0.3, 1.0, 2.3)):
            if tiny and i:
                return
            n = functools.partial(scaled, scale / few)
            yield f"heat {i}", lambda n=n, i=i: heat(n(1000), n(1500), 10, ((16, 16), (32, 8), (64, 4))[i])
            yield f"julia {i}", lambda n=n, i=i: julia(n(1200), (60, 150, 90)[i])
            yield f"bodies {i}", lambda n=n, i=i: bodies(n(6000), (64, 128, 256)[i])
            yield f"image {i}", lambda n=n: image(n(720), n(1280))
            yield f"blurred {i}", lambda n=n, i=i: blurred(n(600), n(800), 1.5 + i)
            yield f"signal {i}", lambda n=n, i=i: signal(2 * n(20_000), (2, 8, 16)[i])
            yield f"equations {i}", lambda n=n, i=i: equations(n(700), (1, 8, 64)[i])
            yield f"eigen {i}", lambda n=n: eigen(n(900), 8)
            yield f"records {i}", lambda n=n, i=i: records(n(800_000), (10, 1000, 50)[i])
            yield f"paths {i}", lambda n=n: paths(n(400_000), 12)
            yield f"image odd {turn}", lambda n=n, turn=turn: image(n(333) + 7 * turn, n(555) + 5 * turn)
    cp.cuda.Device().synchronize()
