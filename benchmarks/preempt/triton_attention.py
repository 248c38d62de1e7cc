"""A flash attention in Triton, forward and not causal, for the program `triton_attention`."""

# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 128, 64


@triton.jit
def forward(q, k, v, out, scale, LENGTH: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    head = tl.program_id(1).to(tl.int64) * LENGTH * WIDTH
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide = tl.arange(0, WIDTH)
    queries = tl.load(q + head + rows[:, None] * WIDTH + wide[None, :])
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, LENGTH, COLUMNS):
        place = head + (start + tl.arange(0, COLUMNS))[:, None] * WIDTH + wide[None, :]
        scores = tl.dot(queries, tl.trans(tl.load(k + place))) * scale
        now = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        kept = tl.exp2(best - now)
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None] + tl.dot(weights.to(v.dtype.element_ty), tl.load(v + place))
        best = now
    tl.store(out + head + rows[:, None] * WIDTH + wide[None, :], (sums / total[:, None]).to(out.dtype.element_ty))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Attention of (heads, length, width), contiguous, into `out`; the length is a multiple of `ROWS`."""
    heads, length, width = q.shape
    scale = math.log2(math.e) / math.sqrt(width)
    grid = (length // ROWS, heads)
    forward[grid](q, k, v, out, scale, length, width, ROWS, COLUMNS, num_warps=8, num_stages=2)
