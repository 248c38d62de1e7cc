"""Numba: kernels as they are written in Python, with 1, 2 and 3 dimensions, shared memory and atomic additions."""

# mypy: ignore-errors

from __future__ import annotations

import functools
import math

import numpy as np

# NumPy 2.5 has no row_stack, for which numba-cuda (0.30.4) asks when it compiles its first kernel. A function of its
# own, since numba-cuda has one for vstack already.
if not hasattr(np, "row_stack"):
    np.row_stack = lambda arrays: np.vstack(arrays)

from numba import cuda, float32, int32

from training.record import Parts

TILE = 16
BINS = 256


@cuda.jit
def blend(a, b, out, share):
    """Two vectors into one."""
    i = cuda.grid(1)
    if i < out.size:
        out[i] = share * a[i] + (1 - share) * b[i]


@cuda.jit
def price(spot, strike, years, rate, spread, call):
    """Black and Scholes, an option a thread, with as many threads as there are and a loop over the rest."""
    for i in range(cuda.grid(1), spot.size, cuda.gridsize(1)):
        root = math.sqrt(years[i])
        d1 = (math.log(spot[i] / strike[i]) + (rate + 0.5 * spread * spread) * years[i]) / (spread * root)
        d2 = d1 - spread * root
        up = 0.5 * (1 + math.erf(d1 / 1.4142135623730951))
        down = 0.5 * (1 + math.erf(d2 / 1.4142135623730951))
        call[i] = spot[i] * up - strike[i] * math.exp(-rate * years[i]) * down


@cuda.jit
def product(a, b, out):
    """Tiles of matrices through shared memory."""
    left = cuda.shared.array((TILE, TILE), float32)
    right = cuda.shared.array((TILE, TILE), float32)
    row, column = cuda.grid(2)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for begin in range(0, a.shape[1], TILE):
        left[x, y] = a[row, begin + y] if row < a.shape[0] and begin + y < a.shape[1] else 0
        right[x, y] = b[begin + x, column] if column < b.shape[1] and begin + x < b.shape[0] else 0
        cuda.syncthreads()
        for k in range(TILE):
            total += left[x, k] * right[k, y]
        cuda.syncthreads()
    if row < out.shape[0] and column < out.shape[1]:
        out[row, column] = total


@cuda.jit
def histogram(values, counts):
    """Bins in shared memory, added at the end."""
    mine = cuda.shared.array(BINS, int32)
    for i in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
        mine[i] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, values[i], 1)
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
        cuda.atomic.add(counts, i, mine[i])


@cuda.jit
def diffuse(field, out, rate):
    """A stencil in three dimensions."""
    x, y, z = cuda.grid(3)
    if 0 < x < field.shape[0] - 1 and 0 < y < field.shape[1] - 1 and 0 < z < field.shape[2] - 1:
        around = field[x - 1, y, z] + field[x + 1, y, z] + field[x, y - 1, z] + field[x, y + 1, z]
        around += field[x, y, z - 1] + field[x, y, z + 1]
        out[x, y, z] = field[x, y, z] + rate * (around - 6 * field[x, y, z])


@cuda.jit
def nearest(points, centres, chosen, distance):
    """Of each point the nearest centre: k-means' first half."""
    i = cuda.grid(1)
    if i >= points.shape[0]:
        return
    best, place = float32(1e30), 0
    for c in range(centres.shape[0]):
        total = float32(0)
        for d in range(points.shape[1]):
            gap = points[i, d] - centres[c, d]
            total += gap * gap
        if total < best:
            best, place = total, c
    chosen[i] = place
    distance[i] = best


@cuda.jit
def gather_sums(points, chosen, sums, counts):
    """The second half, by atomic additions."""
    i = cuda.grid(1)
    if i < points.shape[0]:
        cuda.atomic.add(counts, chosen[i], 1)
        for d in range(points.shape[1]):
            cuda.atomic.add(sums, (chosen[i], d), points[i, d])


@cuda.jit
def collatz(first, steps):
    """Loops of ever other length."""
    i = cuda.grid(1)
    if i < steps.size:
        n, count = first + i, 0
        while n != 1 and count < 500:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            count += 1
        steps[i] = count


@cuda.jit
def total_rows(matrix, out):
    """A block a row: a tree in shared memory."""
    share = cuda.shared.array(256, float32)
    row, me = cuda.blockIdx.x, cuda.threadIdx.x
    total = float32(0)
    for column in range(me, matrix.shape[1], cuda.blockDim.x):
        total += matrix[row, column]
    share[me] = total
    cuda.syncthreads()
    half = cuda.blockDim.x // 2
    while half > 0:
        if me < half:
            share[me] += share[me + half]
        cuda.syncthreads()
        half //= 2
    if me == 0:
        out[row] = share[0]


def blocks(count: int, block: int) -> int:
    """As many as cover `count`."""
    return max(1, -(-count // block))


def vectors(count: int, block: int) -> None:
    """Blends of two vectors."""
    a, b = (cuda.to_device(np.random.default_rng(i).random(count, np.float32)) for i in (1, 2))
    out = cuda.device_array_like(a)
    for i in range(12):
        blend[blocks(count, block), block](a, b, out, np.float32(i / 12))


def options(count: int, block: int, grid: int) -> None:
    """Prices."""
    random = np.random.default_rng(3)
    spot, strike, years = (
        cuda.to_device((random.random(count, np.float32) + 0.5).astype(np.float32)) for _ in range(3)
    )
    call = cuda.device_array_like(spot)
    for _ in range(8):
        price[grid, block](spot, strike, years, np.float32(0.02), np.float32(0.3), call)


def products(m: int, n: int, k: int) -> None:
    """Matrices."""
    a, b = (cuda.to_device(np.ones(shape, np.float32)) for shape in ((m, k), (k, n)))
    out = cuda.device_array((m, n), np.float32)
    for _ in range(4):
        product[(blocks(m, TILE), blocks(n, TILE)), (TILE, TILE)](a, b, out)


def histograms(count: int, grid: int) -> None:
    """Counts of bytes."""
    values = cuda.to_device(np.random.default_rng(4).integers(0, BINS, count).astype(np.int32))
    counts = cuda.to_device(np.zeros(BINS, np.int32))
    for _ in range(6):
        histogram[grid, 128](values, counts)


def fields(side: int, deep: int, block: tuple[int, int, int]) -> None:
    """Diffusion."""
    field = cuda.to_device(np.random.default_rng(5).random((deep, side, side), np.float32))
    out = cuda.device_array_like(field)
    grid = (blocks(deep, block[0]), blocks(side, block[1]), blocks(side, block[2]))
    for _ in range(8):
        diffuse[grid, block](field, out, np.float32(0.1))
        field, out = out, field


def clusters(count: int, width: int, centres: int) -> None:
    """k-means."""
    random = np.random.default_rng(6)
    points = cuda.to_device(random.random((count, width), np.float32))
    middle = random.random((centres, width), np.float32)
    chosen, distance = cuda.device_array(count, np.int32), cuda.device_array(count, np.float32)
    for _ in range(4):
        nearest[blocks(count, 128), 128](points, cuda.to_device(middle), chosen, distance)
        sums, counts = cuda.to_device(np.zeros_like(middle)), cuda.to_device(np.zeros(centres, np.int32))
        gather_sums[blocks(count, 128), 128](points, chosen, sums, counts)
        middle = sums.copy_to_host() / np.maximum(counts.copy_to_host(), 1)[:, None].astype(np.float32)


def numbers(count: int, block: int) -> None:
    """Loops."""
    steps = cuda.device_array(count, np.int32)
    for i in range(4):
        collatz[blocks(count, block), block](1 + i * count, steps)


def rows(height: int, width: int, block: int) -> None:
    """Sums of rows."""
    matrix = cuda.to_device(np.ones((height, width), np.float32))
    out = cuda.device_array(height, np.float32)
    for _ in range(8):
        total_rows[height, block](matrix, out)


def scaled(factor: float, value: int) -> int:
    """A size, scaled."""
    return max(8, int(value * factor))


def parts(tiny: bool) -> Parts:
    """Each with shapes that come again and shapes that do not."""
    few = 32 if tiny else 1
    for turn in range(1 if tiny else 4):
        for i in range(1 if tiny else 5):
            scale = (1.0, 0.2, 3.1, 0.55, 1.7 + 0.3 * turn)[i]
            n = functools.partial(scaled, scale / few)
            yield f"vectors {i}", lambda n=n, i=i: vectors(n(1_000_000), (128, 256, 512, 64, 192)[i])
            yield f"options {i}", lambda n=n, i=i: options(n(600_000), 256, (264, 132, 528, 1000, 60)[i])
            yield f"products {i}", lambda n=n: products(n(400), n(500), n(300))
            yield f"histograms {i}", lambda n=n, i=i: histograms(n(2_000_000), (132, 66, 264, 528, 1056)[i])
            yield f"fields {i}", lambda n=n, i=i: fields(n(100), n(60), ((4, 8, 8), (1, 8, 32), (2, 2, 64))[i % 3])
            yield f"clusters {i}", lambda n=n, i=i: clusters(n(60_000), (2, 8, 16, 4, 3)[i], (16, 64, 8, 100, 32)[i])
            yield f"numbers {i}", lambda n=n, i=i: numbers(n(300_000), (64, 128, 256, 512, 96)[i])
            yield f"rows {i}", lambda n=n, i=i: rows(n(900), n(1100), (32, 64, 128, 256, 64)[i])
    cuda.synchronize()
