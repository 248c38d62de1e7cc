"""A few Triton kernels as people write them; imported where there is a GPU alone."""

# mypy: ignore-errors
# ruff: noqa: N803

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, count, BLOCK: tl.constexpr):
    """One block of a sum of vectors."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    tl.store(out + offsets, tl.load(x + offsets, mask) + tl.load(y + offsets, mask), mask)


@triton.jit
def softmax_kernel(x, out, stride, width, BLOCK: tl.constexpr):
    """One row of a softmax."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + columns, columns < width, -float("inf")).to(tl.float32)
    values = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * stride + columns, values / tl.sum(values, 0), columns < width)


@triton.jit
def layer_norm_kernel(x, out, stride, width, eps, BLOCK: tl.constexpr):
    """One row of a layer normalisation without weights."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + columns, columns < width, 0.0).to(tl.float32)
    mean = tl.sum(values, 0) / width
    centred = tl.where(columns < width, values - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(out + row * stride + columns, centred * scale, columns < width)


@triton.jit
def matmul_kernel(a, b, out, m, n, k, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """One tile of a product of row-major matrices."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, k, DEPTH):
        inner = start + depth
        left = tl.load(a + rows[:, None] * k + inner[None, :], (rows[:, None] < m) & (inner[None, :] < k), 0.0)
        right = tl.load(b + inner[:, None] * n + columns[None, :], (inner[:, None] < k) & (columns[None, :] < n), 0.0)
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * n + columns[None, :], total, (rows[:, None] < m) & (columns[None, :] < n))


def add(x, y, block):
    """Returns x + y, in blocks of `block` elements."""
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block)
    return out


def softmax(x, block):
    """Softmax over the last dimension of (rows, width), width <= block."""
    out = torch.empty_like(x)
    softmax_kernel[(x.shape[0],)](x, out, x.stride(0), x.shape[1], BLOCK=block)
    return out


def layer_norm(x, block):
    """Layer normalisation over the last dimension of (rows, width), width <= block."""
    out = torch.empty_like(x)
    layer_norm_kernel[(x.shape[0],)](x, out, x.stride(0), x.shape[1], 1e-5, BLOCK=block)
    return out


def matmul(a, b, block):
    """Returns a @ b, in square tiles of `block`."""
    out = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(a.shape[0], block), triton.cdiv(b.shape[1], block))
    matmul_kernel[grid](a, b, out, a.shape[0], b.shape[1], a.shape[1], BLOCK=block, DEPTH=32)
    return out
