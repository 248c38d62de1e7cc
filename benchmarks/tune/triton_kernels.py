"""Kernels of quiet_program.py."""

# ruff: noqa: N803  as Triton writes them

import triton
import triton.language as tl


@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr):
    """Y = 2 x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def row_sum(x, y, n, BLOCK: tl.constexpr):
    """The sum of each row."""
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(x + row * n + at, mask=at < n, other=0.0)
    tl.store(y + row, tl.sum(total, axis=0))


@triton.jit
def softmax(x, y, n, BLOCK: tl.constexpr):
    """Of each row, in two passes."""
    row = tl.program_id(0)
    most = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        values = tl.load(x + row * n + at, mask=at < n, other=float("-inf"))
        larger = tl.maximum(most, values)
        total = total * tl.exp(most - larger) + tl.exp(values - larger)
        most = larger
    highest = tl.max(most, axis=0)
    whole = tl.sum(total * tl.exp(most - highest), axis=0)
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        values = tl.load(x + row * n + at, mask=at < n)
        tl.store(y + row * n + at, tl.exp(values - highest) / whole, mask=at < n)


@triton.jit
def transpose(x, y, rows, columns, TILE: tl.constexpr):
    """Y = x, transposed."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = tl.load(x + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(y + column[:, None] * rows + row[None, :], tl.trans(values), mask=tl.trans(inside))


@triton.jit
def matmul(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """C = a b, of whole tiles."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([M, N], dtype=tl.float32)
    for begin in range(0, k, K):
        inner = begin + tl.arange(0, K)
        left = tl.load(a + row[:, None] * k + inner[None, :])
        right = tl.load(b + inner[:, None] * n + column[None, :])
        total += tl.dot(left, right)
    tl.store(c + row[:, None] * n + column[None, :], total.to(tl.float16))
