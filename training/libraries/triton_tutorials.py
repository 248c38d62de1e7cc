"""Triton: what its tutorials are about (sums, softmax, products, dropout, norms, attention), written anew."""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from training.record import Parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def vector_sum(a, b, out, n, SIZE: tl.constexpr):
    """A block of a sum."""
    at = tl.program_id(axis=0) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    left = tl.load(a + at, mask=inside)
    right = tl.load(b + at, mask=inside)
    tl.store(out + at, left + right, mask=inside)


@triton.jit
def rows_softmax(out, x, x_step, out_step, height, width, SIZE: tl.constexpr):
    """Rows in turn, as many programs as there are."""
    for row in range(tl.program_id(0), height, tl.num_programs(0)):
        at = tl.arange(0, SIZE)
        inside = at < width
        value = tl.load(x + row * x_step + at, mask=inside, other=-float("inf"))
        value = tl.exp(value - tl.max(value, axis=0))
        tl.store(out + row * out_step + at, value / tl.sum(value, axis=0), mask=inside)


@triton.jit
def tiles_product(
    a,
    b,
    c,
    M,
    N,
    K,
    am,
    ak,
    bk,
    bn,
    cm,
    cn,
    TM: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    G: tl.constexpr,
    LEAKY: tl.constexpr,
):
    """A tile of a product, with tiles grouped so that the cache is used."""
    program = tl.program_id(0)
    tall, wide = tl.cdiv(M, TM), tl.cdiv(N, TN)
    group = program // (G * wide)
    first = group * G
    height = min(tall - first, G)
    tile_m = first + (program % (G * wide)) % height
    tile_n = (program % (G * wide)) // height
    rm = (tile_m * TM + tl.arange(0, TM)) % M
    rn = (tile_n * TN + tl.arange(0, TN)) % N
    rk = tl.arange(0, TK)
    at_a = a + rm[:, None] * am + rk[None, :] * ak
    at_b = b + rk[:, None] * bk + rn[None, :] * bn
    total = tl.zeros((TM, TN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, TK)):
        left = tl.load(at_a, mask=rk[None, :] < K - k * TK, other=0.0)
        right = tl.load(at_b, mask=rk[:, None] < K - k * TK, other=0.0)
        total = tl.dot(left, right, total)
        at_a += TK * ak
        at_b += TK * bk
    if LEAKY:
        total = tl.where(total >= 0, total, 0.01 * total)
    om = tile_m * TM + tl.arange(0, TM)
    on = tile_n * TN + tl.arange(0, TN)
    tl.store(c + om[:, None] * cm + on[None, :] * cn, total.to(tl.float16), mask=(om[:, None] < M) & (on[None, :] < N))


@triton.jit
def seeded_dropout(x, out, n, p, seed, SIZE: tl.constexpr):
    """Dropout whose mask is a seed."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < n)
    kept = tl.rand(seed, at) > p
    tl.store(out + at, tl.where(kept, value / (1 - p), 0.0), mask=at < n)


@triton.jit
def norm_forward(x, out, weight, bias, means, scales, step, width, eps, SIZE: tl.constexpr):
    """A row of a layer normalisation, in pieces."""
    row = tl.program_id(0)
    total = tl.zeros([SIZE], dtype=tl.float32)
    square = tl.zeros([SIZE], dtype=tl.float32)
    for begin in range(0, width, SIZE):
        at = begin + tl.arange(0, SIZE)
        value = tl.load(x + row * step + at, mask=at < width, other=0.0).to(tl.float32)
        total += value
        square += value * value
    mean = tl.sum(total, axis=0) / width
    scale = 1 / tl.sqrt(tl.sum(square, axis=0) / width - mean * mean + eps)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)
    for begin in range(0, width, SIZE):
        at = begin + tl.arange(0, SIZE)
        inside = at < width
        value = tl.load(x + row * step + at, mask=inside, other=0.0).to(tl.float32)
        w, b = tl.load(weight + at, mask=inside), tl.load(bias + at, mask=inside)
        tl.store(out + row * step + at, (value - mean) * scale * w + b, mask=inside)


@triton.jit
def norm_weights(dy, x, means, scales, dw, db, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Gradients of weight and bias: columns summed over all rows."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sum_w = tl.zeros((COLUMNS,), dtype=tl.float32)
    sum_b = tl.zeros((COLUMNS,), dtype=tl.float32)
    for begin in range(0, height, ROWS):
        rows = begin + tl.arange(0, ROWS)
        inside = (rows[:, None] < height) & (columns[None, :] < width)
        at = rows[:, None] * width + columns[None, :]
        gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(means + rows, mask=rows < height, other=0.0)
        scale = tl.load(scales + rows, mask=rows < height, other=0.0)
        sum_w += tl.sum(gradient * (value - mean[:, None]) * scale[:, None], axis=0)
        sum_b += tl.sum(gradient, axis=0)
    tl.store(dw + columns, sum_w, mask=columns < width)
    tl.store(db + columns, sum_b, mask=columns < width)


@triton.jit
def attend(
    q, k, v, out, scale, heads_step, length, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr
):
    """Attention of some rows of a head, block after block with a running softmax."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    base = tl.program_id(1) * heads_step
    d = tl.arange(0, D)
    query = tl.load(q + base + rows[:, None] * D + d[None, :], mask=rows[:, None] < length, other=0.0)
    most = tl.full((BM,), -1e30, tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    last = length
    if CAUSAL:
        last = min(length, (tl.program_id(0) + 1) * BM)
    for begin in range(0, last, BN):
        columns = begin + tl.arange(0, BN)
        key = tl.load(k + base + columns[None, :] * D + d[:, None], mask=columns[None, :] < length, other=0.0)
        score = tl.dot(query, key) * scale
        seen = columns[None, :] < length
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        score = tl.where(seen, score, -1e30)
        now = tl.maximum(most, tl.max(score, 1))
        chance = tl.exp(score - now[:, None])
        fade = tl.exp(most - now)
        weight = weight * fade + tl.sum(chance, 1)
        value = tl.load(v + base + columns[:, None] * D + d[None, :], mask=columns[:, None] < length, other=0.0)
        total = total * fade[:, None] + tl.dot(chance.to(tl.float16), value)
        most = now
    tl.store(
        out + base + rows[:, None] * D + d[None, :],
        (total / weight[:, None]).to(tl.float16),
        mask=rows[:, None] < length,
    )


def vectors(n: int, size: int) -> None:
    """Sums."""
    a, b = torch.rand(n, device=DEVICE), torch.rand(n, device=DEVICE)
    out = torch.empty_like(a)
    for _ in range(6):
        vector_sum[(triton.cdiv(n, size),)](a, b, out, n, SIZE=size)


def softmax(height: int, width: int, programs: int, warps: int) -> None:
    """Rows."""
    x = torch.randn(height, width, device=DEVICE)
    out = torch.empty_like(x)
    size = triton.next_power_of_2(width)
    for _ in range(4):
        rows_softmax[(min(programs, height),)](
            out, x, x.stride(0), out.stride(0), height, width, SIZE=size, num_warps=warps
        )


def product(m: int, n: int, k: int, tile: tuple[int, int, int], stages: int, leaky: bool) -> None:
    """Half precision."""
    a, b = torch.randn(m, k, device=DEVICE).half(), torch.randn(k, n, device=DEVICE).half()
    c = torch.empty(m, n, device=DEVICE, dtype=torch.float16)
    grid = (triton.cdiv(m, tile[0]) * triton.cdiv(n, tile[1]),)
    strides = (*a.stride(), *b.stride(), *c.stride())
    for _ in range(3):
        tiles_product[grid](
            a, b, c, m, n, k, *strides, TM=tile[0], TN=tile[1], TK=tile[2], G=8, LEAKY=leaky,
            num_warps=8 if tile[0] * tile[1] > 8192 else 4, num_stages=stages,
        )  # fmt: skip


def dropout(n: int, size: int) -> None:
    """Of one seed after another."""
    x = torch.rand(n, device=DEVICE)
    out = torch.empty_like(x)
    for seed in range(5):
        seeded_dropout[(triton.cdiv(n, size),)](x, out, n, 0.3, seed, SIZE=size)


def norm(height: int, width: int, size: int) -> None:
    """Forward, and the gradients of the weights."""
    x, dy = torch.randn(height, width, device=DEVICE).half(), torch.randn(height, width, device=DEVICE).half()
    out, weight, bias = torch.empty_like(x), torch.ones(width, device=DEVICE), torch.zeros(width, device=DEVICE)
    means, scales = torch.empty(height, device=DEVICE), torch.empty(height, device=DEVICE)
    dw, db = torch.empty_like(weight), torch.empty_like(bias)
    for _ in range(3):
        norm_forward[(height,)](x, out, weight, bias, means, scales, x.stride(0), width, 1e-5, SIZE=size)
        norm_weights[(triton.cdiv(width, 128),)](dy, x, means, scales, dw, db, height, width, ROWS=32, COLUMNS=128)


def attention(batch: int, heads: int, length: int, width: int, rows: int, causal: bool) -> None:
    """Of a few sequences."""
    q, k, v = (torch.randn(batch * heads, length, width, device=DEVICE).half() for _ in range(3))
    out = torch.empty_like(q)
    grid = (triton.cdiv(length, rows), batch * heads)
    for _ in range(3):
        attend[grid](q, k, v, out, width**-0.5, length * width, length, BM=rows, BN=64, D=width, CAUSAL=causal)


def scaled(factor: float, value: int) -> int:
    """A size, scaled."""
    return max(17, int(value * factor))


def parts(tiny: bool) -> Parts:
    """Tutorials one after the other, then with other shapes."""
    tiles = ((128, 128, 32), (64, 64, 32), (128, 64, 64), (64, 128, 32), (32, 32, 32))
    for turn in range(1 if tiny else 4):
        for i in range(1 if tiny else 6):
            s = 0.02 if tiny else (1.0, 0.25, 2.2, 0.5, 3.1, 1.4 + 0.35 * turn)[i]
            n = functools.partial(scaled, s)
            yield f"vectors {i}", lambda n=n, i=i: vectors(n(3_000_000), (1024, 512, 2048, 256, 4096, 1024)[i])
            yield (
                f"softmax {i}",
                lambda n=n, i=i: softmax(n(1500), n(781), (264, 528, 132, 1056, 400, 264)[i], (4, 8)[i % 2]),
            )
            yield f"product {i}", lambda n=n, i=i: product(n(900), n(1100), n(700), tiles[i % 5], 2 + i % 3, i % 2 == 0)
            yield f"dropout {i}", lambda n=n, i=i: dropout(n(2_000_000), (1024, 512)[i % 2])
            yield f"norm {i}", lambda n=n, i=i: norm(n(1200), n(1000), (1024, 512, 2048)[i % 3])
            yield (
                f"attention {i}",
                lambda n=n, i=i: attention(1 + i, 8, n(600), (64, 128, 32)[i % 3], (64, 128)[i % 2], i % 2 == 1),
            )
        if DEVICE == "cuda":
            torch.cuda.synchronize()
